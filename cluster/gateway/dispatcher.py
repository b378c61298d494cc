"""What the gateway needs of the scheduler, as a protocol.

Invariant: the gateway knows of no Ray; the actors hand it a `Dispatcher` that asks the scheduler actor, tests one that
places in process. Called by `cluster.gateway.service`.
"""

from dataclasses import dataclass
from typing import Protocol

from cluster.routing.decisions import Explanation
from cluster.routing.types import DispatchQuery, Placement, Refusal, WorkerStatus


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The cluster as the scheduler sees it."""

    workers: tuple[WorkerStatus, ...]
    directory_up: bool


class Dispatcher(Protocol):
    """Places requests. Its methods raise `Unavailable` when the scheduler can't be asked."""

    async def dispatch(self, query: DispatchQuery) -> Placement | Refusal:
        """Where to run a request; the load is reserved there at once."""

    async def suspect(self, worker_id: str, epoch: int) -> None:
        """That life of the worker failed a request: it should get no new ones until it is heard of again."""

    async def explain(self, request_id: str, tenant: str) -> tuple[Explanation, ...]:
        """How a recent request of that tenant was placed, by attempts; empty if it is unknown or forgotten."""

    async def state(self) -> ClusterState:
        """All workers, by id."""
