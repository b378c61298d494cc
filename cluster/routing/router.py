"""The scheduler without its process: takes registrations, heartbeats and reports, and places requests.

Owns the prefix map, the leases, the report order and the reservations of every worker, and keeps them in step.
Invariants: a worker is a candidate only between its registration and the end of its lease; reports and heartbeats of
any other epoch change nothing; a placement is chosen and reserved in one synchronous call, so two requests can't take
the same free place.

Every method takes `now`, seconds on the caller's monotonic clock. Called by the scheduler actor, on one thread.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.core.frontier import FrontierReport
from cluster.errors import ConfigError, StaleEpoch
from cluster.routing.decisions import Decision, Decisions, Explanation
from cluster.routing.eligibility import Eligibility
from cluster.routing.health import Leases
from cluster.routing.policy import (
    Candidate,
    CostModel,
    choose,
    expected_frontier,
    lacking_tokens,
    prefill_ms,
    prefill_weight,
)
from cluster.routing.prefix_map import NOTHING, Depth, PrefixMap, Survey
from cluster.routing.promises import Promises
from cluster.routing.report_order import ReportOrder, Verdict
from cluster.routing.reservations import Work
from cluster.routing.shortlist import mean_backlog_ms, shortlist
from cluster.routing.types import DispatchQuery, Placement, Refusal, WorkerInfo, WorkerLoad, WorkerStatus
from cluster.routing.worker_state import WorkerState

Hints = Mapping[tuple[str, int], Depth]
"""(worker id, epoch) -> depth, from the directory."""


@dataclass(frozen=True, slots=True)
class RouterLimits:
    lease_s: float = 5.0
    """A worker that has not been heard of for this long is dead."""
    reservation_s: float = 2.0
    promise_s: float = 2.0
    """How long beyond its predicted first token a placed prompt counts as held there."""
    max_blocks: int = 2_000_000
    """Hard cap of the prefix map."""


@dataclass(frozen=True, slots=True)
class HeartbeatReply:
    """What the scheduler asks of a worker."""

    registered: bool
    """False: this life of the worker is unknown here, register (again)."""
    want_snapshot: bool
    """Reports are missing: send everything."""


class Router:
    def __init__(self, limits: RouterLimits, costs: CostModel, rng: random.Random) -> None:
        self.map = PrefixMap(limits.max_blocks)
        self._limits = limits
        self._costs = costs
        self._rng = rng
        self._leases = Leases(limits.lease_s)
        self._eligibility = Eligibility(self._leases)
        self._promises = Promises()
        self._decisions = Decisions()
        self._workers: dict[str, WorkerState] = {}
        self._reserved: deque[tuple[float, WorkerState]] = deque()
        """When reservations end that aren't confirmed by then, in order of time."""

    # ---------------------------------------------------------------- workers

    def register(self, info: WorkerInfo, last_seq: int, now: float) -> None:
        """Takes a life of a worker in, which has sent `last_seq` reports so far. Doing it twice changes nothing.

        Raises:
            StaleEpoch: a later life of that worker is registered.
            ConfigError: another worker serves the same model under different keys; reuse between them would silently
            fail.
        """
        known = self._workers.get(info.worker_id)
        if known is not None and known.info.epoch > info.epoch:
            raise StaleEpoch(info.epoch, known.info.epoch)
        self._check_agreement(info)
        self._leases.grant(info.worker_id, info.epoch, now)
        if known is not None and known.info.epoch == info.epoch:
            known.info = info
            return
        order = ReportOrder(info.epoch)
        order.note_sent(last_seq)
        self._workers[info.worker_id] = WorkerState(info, order, self._costs, self._limits.reservation_s)
        self._promises.drop(info.worker_id)
        self.map.reset(info.worker_id)

    def heartbeat(self, worker_id: str, epoch: int, load: WorkerLoad, now: float) -> HeartbeatReply:
        worker = self._find(worker_id, epoch)
        if worker is None or not self._leases.renew(worker_id, epoch, now):
            return HeartbeatReply(registered=False, want_snapshot=False)
        worker.heard(load, now)
        worker.order.note_sent(load.last_seq)
        return HeartbeatReply(registered=True, want_snapshot=not worker.order.complete)

    def apply(self, report: FrontierReport) -> Verdict:
        """Brings one report into the map; on GAP the worker is to be asked for a snapshot."""
        worker = self._find(report.worker, report.epoch)
        if worker is None:
            return Verdict.STALE
        verdict = worker.order.judge(report)
        if verdict is Verdict.APPLY:
            if report.snapshot:
                self.map.reset(report.worker)
            self.map.remove(report.worker, report.removed)
            self.map.store(report.worker, report.stored)
        return verdict

    def suspect(self, worker_id: str, epoch: int) -> None:
        """Somebody failed to reach it: no new requests until it is heard of again."""
        self._leases.suspect(worker_id, epoch)

    def lose(self, worker_id: str, epoch: int) -> bool:
        """That life of the worker is over, for sure. Returns whether it was registered."""
        if self._find(worker_id, epoch) is None:
            return False
        del self._workers[worker_id]
        self._leases.revoke(worker_id)
        self._promises.drop(worker_id)
        self.map.drop(worker_id)
        return True

    def expire(self, now: float) -> list[WorkerInfo]:
        """Ends what ran out of time; returns the workers whose lease did. To be called a few times a second."""
        self._end_reservations(now)
        self._promises.expire(now)
        dead = [self._workers[worker_id].info for worker_id in self._leases.expired(now)]
        for info in dead:
            self.lose(info.worker_id, info.epoch)
        self.map.sweep()
        return dead

    # ---------------------------------------------------------------- requests

    def incomplete(self, model: str) -> bool:
        """Whether the picture of some worker of that model has gaps, so that the directory's hints are worth asking
        for."""
        return any(w.info.model.name == model and not w.order.complete for w in self._workers.values())

    def dispatch(self, query: DispatchQuery, now: float, hints: Hints | None = None) -> Placement | Refusal:
        """Chooses the cheapest worker and reserves its load, in one step."""
        self._end_reservations(now)
        up = self._eligibility.alive(query, self._workers.values(), now)
        if not up:
            self._decided(query, now, up, (), 1.0, None)
            return self._nobody(query)
        depths, slack = self._depths(query, now, hints or {}) if query.reuse else Survey({}, 0)
        weight = prefill_weight(query, mean_backlog_ms(up, now), self._costs)
        few = shortlist(query, up, depths, weight * self._costs.target_token_ms, now, self._rng)
        candidates = [self._candidate(worker, query, depths, slack, now) for worker in few]
        chosen = choose(query, candidates, self._costs, self._rng, weight)
        self._decided(query, now, up, candidates, weight, chosen)
        if chosen is None:
            return self._full(up)
        return self._reserve(query, chosen, now)

    def explain(self, request_id: str, tenant: str, now: float) -> tuple[Explanation, ...]:
        """How a request of that tenant was placed, one explanation for each attempt; empty if that is forgotten."""
        return tuple(decision.explain(self._costs, now) for decision in self._decisions.find(request_id, tenant))

    def status(self, now: float) -> list[WorkerStatus]:
        return [
            WorkerStatus(
                info=worker.info,
                load=worker.load,
                state=self._leases.state(worker_id, now),
                heartbeat_age_s=self._leases.age(worker_id, now),
                reserved=len(worker.reservations),
                blocks_known=self.map.blocks_of(worker_id),
            )
            for worker_id, worker in sorted(self._workers.items())
        ]

    # ---------------------------------------------------------------- inside

    def _find(self, worker_id: str, epoch: int) -> WorkerState | None:
        worker = self._workers.get(worker_id)
        return worker if worker is not None and worker.info.epoch == epoch else None

    def _check_agreement(self, info: WorkerInfo) -> None:
        for other in self._workers.values():
            if other.info.worker_id == info.worker_id or other.info.model.name != info.model.name:
                continue
            difference = info.model.disagreement(other.info.model)
            if difference is not None:
                raise ConfigError(
                    f"worker {info.worker_id} and worker {other.info.worker_id} serve {info.model.name} with different "
                    f"{difference}: start them with the same model folder and engine options."
                )

    def _end_reservations(self, now: float) -> None:
        while self._reserved and self._reserved[0][0] <= now:
            self._reserved.popleft()[1].expire(now)

    def _depths(self, query: DispatchQuery, now: float, hints: Hints) -> Survey:
        depths, slack = self.map.survey(query.keys)
        for worker_id, promised in self._promises.depths(query.keys, now).items():
            known = depths.get(worker_id, NOTHING)
            depths[worker_id] = Depth(max(known.target, promised.target), max(known.draft, promised.draft))
        for (worker_id, epoch), hint in hints.items():
            worker = self._find(worker_id, epoch)
            if worker is not None and not worker.order.complete:
                known = depths.get(worker_id, NOTHING)
                depths[worker_id] = Depth(max(known.target, hint.target), max(known.draft, hint.draft))
        return Survey(depths, slack)

    def _candidate(
        self, worker: WorkerState, query: DispatchQuery, depths: Mapping[str, Depth], slack: int, now: float
    ) -> Candidate:
        rough = depths.get(worker.worker_id, NOTHING)
        return worker.candidate(self.map.refine(worker.worker_id, query.keys, rough, slack), now)

    def _decided(
        self,
        query: DispatchQuery,
        now: float,
        up: Sequence[WorkerState],
        candidates: Sequence[Candidate],
        weight: float,
        chosen: Candidate | None,
    ) -> None:
        passed_over = {worker.worker_id: "full" for worker in up if worker.in_flight >= worker.capacity}
        if len(up) < len(self._workers):
            passed_over |= self._eligibility.reasons(query, self._workers.values(), up, now)
        name = None if chosen is None else chosen.info.worker_id
        kept = replace(query, keys=())
        self._decisions.add(Decision(kept, now, tuple(candidates), weight, name, passed_over))

    def _reserve(self, query: DispatchQuery, chosen: Candidate, now: float) -> Placement:
        info = chosen.info
        worker = self._workers[info.worker_id]
        lacking, _ = lacking_tokens(query, info, chosen.depth)
        work = Work(query.n_tokens, lacking, prefill_ms(query, info, chosen.depth, self._costs))
        worker.place(query.request_id, work, now)
        self._reserved.append((now + self._limits.reservation_s, worker))
        if query.reuse:
            until = worker.busy_until + self._limits.promise_s
            self._promises.add(info.worker_id, query.keys, query.speculate, until)
        self.map.touch(query.keys[: max(chosen.depth)])
        return Placement(info.worker_id, info.epoch, info.address, expected_frontier(query, info, chosen.depth))

    def _nobody(self, query: DispatchQuery) -> Refusal:
        if query.worker_id:
            reason = (
                f"worker_id is {query.worker_id}, but no worker of that name can take a request now: leave it unset."
            )
            return Refusal(reason, retry_after_s=self._limits.lease_s, saturated=False)
        reason = f"no worker serving {query.model} is alive; try again in a few seconds."
        return Refusal(reason, retry_after_s=self._limits.lease_s, saturated=False)

    def _full(self, up: Sequence[WorkerState]) -> Refusal:
        # The time until the worker with the shortest queue has finished one request.
        shortest = min(worker.in_flight / worker.info.max_running for worker in up)
        wait_s = max(0.1, self._costs.queued_request_ms / 1000.0 / max(shortest, 1.0))
        places = sum(worker.info.capacity for worker in up)
        return Refusal(f"all {places} places of {len(up)} workers are taken; try again later.", wait_s, saturated=True)
