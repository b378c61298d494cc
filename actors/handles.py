"""How the processes find and call each other on Ray: names, and calls that survive the scheduler's death.

Invariant: a call to the scheduler either returns its answer or raises `Unavailable`, within its time limit; Ray's own
exceptions and handles stay inside this package. Used by the worker, gateway and supervisor actors.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from actors.runtime import NAMESPACE
from cluster.core.frontier import FrontierReport
from cluster.errors import TandemError, Unavailable
from cluster.gateway.dispatcher import ClusterState
from cluster.observe.logging import event
from cluster.routing.decisions import Explanation
from cluster.routing.router import HeartbeatReply
from cluster.routing.types import DispatchQuery, Placement, Refusal, WorkerInfo, WorkerLoad

SCHEDULER = "tandem-scheduler"
GATEWAY = "tandem-gateway"
_RETRY_S = 0.1

logger = logging.getLogger(__name__)


def worker_name(worker_id: str) -> str:
    """Ray's name of a worker's actor."""
    return f"tandem-{worker_id}"


class SchedulerClient:
    """The scheduler from another process. Looks its actor up by name, again whenever it has died."""

    def __init__(self) -> None:
        self._handle: ActorHandle[Any] | None = None

    async def register(self, info: WorkerInfo, last_seq: int) -> None:
        """Raises what the scheduler refuses the worker with."""
        refusal: TandemError | None = await self._call("register", info, last_seq, limit_s=30.0)
        if refusal is not None:
            raise refusal

    async def heartbeat(self, worker_id: str, epoch: int, load: WorkerLoad) -> HeartbeatReply:
        reply: HeartbeatReply = await self._call("heartbeat", worker_id, epoch, load, limit_s=5.0)
        return reply

    async def report(self, report: FrontierReport) -> bool:
        """Returns whether the scheduler asks for a snapshot."""
        return bool(await self._call("report", report, limit_s=5.0))

    async def dispatch(self, query: DispatchQuery) -> Placement | Refusal:
        """Waits out a restart of the scheduler."""
        answer: Placement | Refusal = await self._call("dispatch", query, limit_s=15.0)
        return answer

    async def suspect(self, worker_id: str, epoch: int) -> None:
        """Tells that this life of the worker could not be reached. Best effort: the lease tells in any case."""
        with suppress(Unavailable):
            await self._call("suspect", worker_id, epoch, limit_s=5.0)

    async def explain(self, request_id: str, tenant: str) -> tuple[Explanation, ...]:
        told: tuple[Explanation, ...] = await self._call("explain", request_id, tenant, limit_s=5.0)
        return told

    async def state(self) -> ClusterState:
        state: ClusterState = await self._call("state", limit_s=5.0)
        return state

    async def _call(self, method: str, *arguments: object, limit_s: float) -> Any:
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    handle = self._find()
                    if handle is not None:
                        try:
                            return await getattr(handle, method).remote(*arguments)
                        except RayActorError:
                            self._handle = None
                        except RayTaskError:
                            logger.exception(event("scheduler_failed", method=method))
                            raise Unavailable("The scheduler failed on this: look into its log.") from None
                    await asyncio.sleep(_RETRY_S)
        except TimeoutError:
            raise Unavailable("The scheduler did not answer in time: try again in a few seconds.") from None

    def _find(self) -> ActorHandle[Any] | None:
        """The living scheduler, or None while there is none under its name."""
        if self._handle is None:
            with suppress(ValueError):
                self._handle = ray.get_actor(SCHEDULER, NAMESPACE)
        return self._handle
