"""A worker's process: one engine with its pools and gRPC service, known to the scheduler.

Invariant: each life of a worker has an epoch of its own, larger than those before. Tokens go from here to the gateway
over gRPC and never through Ray. Created and watched by `actors.supervisor`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass

import ray

from actors.handles import SchedulerClient
from actors.member import Loaded
from actors.reporting import Reporting
from cluster.engine.config import EngineConfig
from cluster.errors import TandemError
from cluster.observe.logging import event, setup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    worker_id: str
    engine: EngineConfig
    model_name: str
    """The name that clients ask for."""
    log_level: str = "info"


@ray.remote
class WorkerActor:
    def __init__(self, options: WorkerOptions) -> None:
        setup(options.log_level)
        self._options = options
        self._epoch = time.time_ns() // 1000

    async def load(self) -> Loaded | TandemError:
        """Loads the models, in a thread: the process keeps answering meanwhile."""
        from actors.engine_host import EngineHost, load_engine  # bring torch: workers alone need it

        began, options = time.monotonic(), self._options
        try:
            engine = await asyncio.to_thread(load_engine, options.engine)
        except TandemError as refusal:
            return refusal
        self._host = EngineHost(engine, options.worker_id, self._epoch, options.model_name)
        info = await self._host.start()
        self._reporting = Reporting(info, SchedulerClient(), self._host.load, self._host.snapshot)
        self._host.listen(self._reporting.collect, self._reporting.load_changed)
        took_s = time.monotonic() - began
        logger.info(event("worker_ready", worker=info.worker_id, epoch=info.epoch, address=info.address, took_s=took_s))
        return Loaded(os.getpid(), worker=info)

    async def run(self) -> TandemError | None:
        """Serves until the engine's thread dies or the scheduler refuses this worker; returns its reason."""
        ended = asyncio.create_task(self._host.ended())
        reporting = asyncio.create_task(self._reporting.run())
        await asyncio.wait((ended, reporting), return_when=asyncio.FIRST_COMPLETED)
        for task in (ended, reporting):
            task.cancel()
        failure = reporting.exception() if reporting.done() and not reporting.cancelled() else None
        logger.error(event("worker_ended", worker=self._options.worker_id, failure=failure))
        return failure if isinstance(failure, TandemError) else None
