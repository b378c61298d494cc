"""What the router believes of one life of one worker: how busy it is until when, and how full.

A heartbeat sets the picture; what is placed afterwards is added to it, and time takes from it: prefill announced a
second ago is a second nearer its end. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

from cluster.core.paired_cache import TARGET
from cluster.routing.policy import Candidate, CostModel
from cluster.routing.prefix_map import Depth
from cluster.routing.report_order import ReportOrder
from cluster.routing.reservations import Reservations, Work
from cluster.routing.types import WorkerInfo, WorkerLoad


class WorkerState:
    def __init__(self, info: WorkerInfo, order: ReportOrder, costs: CostModel, reservation_s: float) -> None:
        self.info = info
        self.order = order
        self.load = WorkerLoad()
        self.reservations = Reservations(reservation_s)
        self.busy_until = 0.0
        """When its prefill will have ended, on the router's clock."""
        self._costs = costs

    @property
    def in_flight(self) -> int:
        return self.load.running + self.load.waiting + len(self.reservations)

    def heard(self, load: WorkerLoad, now: float) -> None:
        """Takes a heartbeat's figures over."""
        self.load = load
        self.reservations.confirm(load.started, load.waiting)
        known = self.reservations
        running = max(0, load.prefill_tokens - known.waiting.tokens)
        backlog_ms = running * self._costs.target_token_ms + known.waiting.prefill_ms + known.reserved.prefill_ms
        self.busy_until = now + backlog_ms / 1000.0

    def place(self, request_id: str, work: Work, now: float) -> None:
        """Reserves a request's load."""
        self.reservations.add(request_id, work, now)
        self.busy_until = max(self.busy_until, now) + work.prefill_ms / 1000.0

    def candidate(self, depth: Depth, now: float) -> Candidate:
        backlog_ms = max(0.0, 1000.0 * (self.busy_until - now))
        pool = next((pool for pool in self.load.pools if pool.name == TARGET), None)
        if pool is None:
            return Candidate(self.info, depth, self.in_flight, backlog_ms, acceptance=self.load.acceptance)
        block, coming = (
            self.info.model.block_size,
            self.reservations.reserved.lacking + self.reservations.waiting.lacking,
        )
        return Candidate(
            self.info,
            depth,
            self.in_flight,
            backlog_ms,
            free_tokens=pool.free * block - coming,
            room_tokens=(pool.free + pool.cached) * block - coming,
            request_tokens=pool.in_use * block / max(1, self.load.running),
            acceptance=self.load.acceptance,
        )
