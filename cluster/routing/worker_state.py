"""What the router believes of one life of one worker: how busy it is until when, and how full.

A heartbeat sets the picture; what is placed afterwards is added to it, and time takes from it: prefill announced a
second ago is a second nearer its end. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

from cluster.core.paired_cache import TARGET
from cluster.routing.policy import Candidate, CostModel, decode_ms, queue_ms
from cluster.routing.prefix_map import NOTHING, Depth
from cluster.routing.report_order import ReportOrder
from cluster.routing.reservations import Reservations, Work
from cluster.routing.types import WorkerInfo, WorkerLoad

_ENDLESS = float("inf")


class WorkerState:
    """`busy_until` is when its prefill will have ended, on the router's clock; `in_flight` counts its requests, those
    reserved included; `decode_ms` and `queue_ms` are what a request of no size would pay under these heads."""

    def __init__(self, info: WorkerInfo, order: ReportOrder, costs: CostModel, reservation_s: float) -> None:
        self.info = info
        self.worker_id = info.worker_id
        self.capacity = info.capacity
        self.order = order
        self.load = WorkerLoad()
        self.reservations = Reservations(reservation_s)
        self.busy_until = 0.0
        self.in_flight = 0
        self.decode_ms = self.queue_ms = 0.0
        self._costs = costs
        self._free = self._room = _ENDLESS
        self._request_tokens = 0.0

    def heard(self, load: WorkerLoad, now: float) -> None:
        """Takes a heartbeat's figures over."""
        self.load = load
        known = self.reservations
        known.confirm(load.started, load.waiting)
        backlog_ms = known.prefilling_ms(load.prefill_tokens, self._costs)
        backlog_ms += known.waiting.prefill_ms + known.reserved.prefill_ms
        self.busy_until = now + backlog_ms / 1000.0
        block = self.info.model.block_size
        for pool in load.pools:
            if pool.name == TARGET:
                self._free, self._room = pool.free * block, (pool.free + pool.cached) * block
                self._request_tokens = pool.in_use * block / max(1, load.running)
        self._sum_up(now)

    def place(self, request_id: str, work: Work, now: float) -> None:
        """Reserves a request's load."""
        self.reservations.add(request_id, work, now)
        self.busy_until = max(self.busy_until, now) + work.prefill_ms / 1000.0
        self._sum_up(now)

    def expire(self, now: float) -> None:
        """Gives up reservations whose requests never arrived."""
        self.reservations.expire(now)
        self._sum_up(now)

    def candidate(self, depth: Depth, now: float) -> Candidate:
        known = self.reservations
        coming = known.reserved.lacking + known.waiting.lacking
        return Candidate(
            self.info,
            depth,
            self.in_flight,
            max(0.0, 1000.0 * (self.busy_until - now)),
            self._free - coming,
            self._room - coming,
            self._request_tokens,
            self.load.acceptance,
        )

    def _sum_up(self, now: float) -> None:
        self.in_flight = self.load.running + self.load.waiting + len(self.reservations)
        candidate = self.candidate(NOTHING, now)
        self.decode_ms, self.queue_ms = decode_ms(candidate, self._costs), queue_ms(0, candidate, self._costs)
