"""Which workers may take a request at all, apart from what it would cost there.

Invariant: a worker that isn't eligible is never priced. Who is alive is looked up once and kept until a lease is
granted, doubted, revoked or could have run out: with hundreds of workers, looking at each for every request would
cost more than choosing. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.routing.health import Leases
from cluster.routing.types import DispatchQuery
from cluster.routing.worker_state import WorkerState


class Eligibility:
    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._alive: dict[str, list[WorkerState]] = {}
        """Live workers by the name of their model."""
        self._seen = leases.version
        self._until = 0.0

    def alive(self, query: DispatchQuery, workers: Iterable[WorkerState], now: float) -> Sequence[WorkerState]:
        """Of all workers, those that serve the model, are believed alive and didn't just fail this request."""
        if self._seen != self._leases.version or now > self._until:
            self._look(workers, now)
        alive = self._alive.get(query.model, [])
        if query.exclude:
            return [worker for worker in alive if worker.worker_id not in query.exclude]
        return alive

    def _look(self, workers: Iterable[WorkerState], now: float) -> None:
        live, self._alive = self._leases.live(now), {}
        for worker in workers:
            if worker.worker_id in live:
                self._alive.setdefault(worker.info.model.name, []).append(worker)
        self._seen, self._until = self._leases.version, self._leases.first_end(now)
