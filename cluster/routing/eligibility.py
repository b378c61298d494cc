"""Which workers may take a request at all, apart from what it would cost there.

Invariant: a worker that isn't eligible is never priced. Called by `cluster.routing.router`.
"""

from __future__ import annotations

from collections.abc import Iterable

from cluster.routing.health import Leases
from cluster.routing.types import DispatchQuery
from cluster.routing.worker_state import WorkerState


def alive(query: DispatchQuery, workers: Iterable[WorkerState], leases: Leases, now: float) -> list[WorkerState]:
    """Workers that serve the model, are believed alive and didn't just fail this request."""
    live = leases.live(now)
    return [
        worker
        for worker in workers
        if worker.worker_id in live and worker.info.model.name == query.model and worker.worker_id not in query.exclude
    ]


def with_room(workers: Iterable[WorkerState]) -> list[WorkerState]:
    """Those whose batch and queue have a place left."""
    return [worker for worker in workers if worker.in_flight < worker.capacity]
