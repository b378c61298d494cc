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
        if query.exclude or query.worker_id:
            return [worker for worker in alive if _wanted(query, worker)]
        return alive

    def reasons(
        self, query: DispatchQuery, workers: Iterable[WorkerState], alive: Sequence[WorkerState], now: float
    ) -> dict[str, str]:
        """Why each of the other workers may not take the request."""
        able = {worker.worker_id for worker in alive}
        return {
            worker.worker_id: self._reason(query, worker, now) for worker in workers if worker.worker_id not in able
        }

    def _reason(self, query: DispatchQuery, worker: WorkerState, now: float) -> str:
        if worker.info.model.name != query.model:
            return f"serves {worker.info.model.name}"
        if worker.worker_id in query.exclude:
            return "just failed this request"
        if not _wanted(query, worker):
            return f"the request names {query.worker_id}"
        return f"is {self._leases.state(worker.worker_id, now)}"

    def _look(self, workers: Iterable[WorkerState], now: float) -> None:
        live, self._alive = self._leases.live(now), {}
        for worker in workers:
            if worker.worker_id in live:
                self._alive.setdefault(worker.info.model.name, []).append(worker)
        self._seen, self._until = self._leases.version, self._leases.first_end(now)


def _wanted(query: DispatchQuery, worker: WorkerState) -> bool:
    return worker.worker_id not in query.exclude and query.worker_id in ("", worker.worker_id)
