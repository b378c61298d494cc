"""The engine of one worker with its gRPC service: what `actors.worker` runs, without Ray.

Owns the way from engine to outside: requests come in over gRPC, changes of the pools go to a listener, load figures
are read from the latest step. Imports torch, so that only workers import it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from transformers.utils import logging as transformers_logging

from cluster.core.ledger import FrontierChanges
from cluster.core.paired_cache import PoolMeters, PoolSpec
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.loop import EngineLoop, RequestStream
from cluster.engine.stats import EngineStats
from cluster.routing.types import ModelCard, PoolSize, PoolUsage, WorkerInfo, WorkerLoad
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2
from cluster.rpc.server import RpcServer, ServerOptions
from cluster.rpc.worker_service import WorkerService

ChangesListener = Callable[[FrontierChanges], None]

_LOOK_S = 0.5


def load_engine(config: EngineConfig) -> Engine:
    """Loads the models and allocates the pools; blocks for as long as that takes.

    Raises:
        TandemError: the models can't be served, or not with these options.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would fill the cluster's log
    return Engine(config)


class EngineHost:
    """Belongs to one asyncio loop, on which it is made."""

    def __init__(self, engine: Engine, worker_id: str, epoch: int, model_name: str) -> None:
        self._engine, self._worker_id, self._epoch, self._model_name = engine, worker_id, epoch, model_name
        self._loop = _NotingLoop(engine, self._after_step)
        self._on_changes: ChangesListener = lambda changes: None
        self._on_load: Callable[[], None] = lambda: None
        self._last_load = (0, 0, 0)
        service = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]
        self._server = RpcServer({service: WorkerService(self._loop, epoch)}, ServerOptions())

    def listen(self, on_changes: ChangesListener, on_load: Callable[[], None]) -> None:
        """Has the listeners called, on the engine's thread: with what changes in the pools from now on, and when
        requests have come or gone."""
        self._on_changes, self._on_load = on_changes, on_load

    async def start(self) -> WorkerInfo:
        """Starts the engine's thread and the service."""
        self._loop.start()
        return self._info(await self._server.start())

    async def ended(self) -> None:
        """Returns when the engine's thread is no longer there to take requests."""
        while self._loop.alive:
            await asyncio.sleep(_LOOK_S)

    def load(self, last_seq: int) -> WorkerLoad:
        """Figures for a heartbeat, and the requests that they contain for the first time."""
        stats = self._loop.stats()
        return WorkerLoad(
            running=stats.running,
            waiting=stats.waiting,
            prefill_tokens=stats.backlog,
            started=self._loop.take_started(stats),
            pools=tuple(_usage(name, meters) for name, meters in stats.pools.items()),
            last_seq=last_seq,
            acceptance=stats.acceptance_length or 1.0,
        )

    async def snapshot(self) -> None:
        """Has the listener called with everything that the pools hold."""
        await self._loop.call(lambda engine: self._on_changes(engine.snapshot()))

    def _after_step(self, engine: Engine) -> None:
        self._on_changes(engine.drain_changes())
        stats = self._loop.stats()
        load = stats.running, stats.waiting, stats.finished_requests
        if load != self._last_load:
            self._last_load = load
            self._on_load()

    def _info(self, address: str) -> WorkerInfo:
        parts, config = self._engine.parts, self._engine.config
        target = parts.cache.pools["target"].spec
        return WorkerInfo(
            worker_id=self._worker_id,
            epoch=self._epoch,
            address=address,
            model=ModelCard(
                name=self._model_name,
                fingerprint=target.model,
                kv_dtype=target.kv_dtype,
                block_size=target.block_size,
                max_len=parts.max_len,
                vocab_size=parts.target.vocab_size,
            ),
            coupling=parts.cache.coupling,
            max_running=config.max_batch,
            max_queue=config.max_queue,
            pools=tuple(_size(pool.spec, parts.kv[name]) for name, pool in parts.cache.pools.items()),
            method=str(config.method),
            num_speculative_tokens=config.num_speculative_tokens if parts.drafter is not None else 0,
            pid=os.getpid(),
        )


class _NotingLoop(EngineLoop):
    """Remembers which requests came in, until the figures of a later step contain them."""

    def __init__(self, engine: Engine, after_step: Callable[[Engine], None]) -> None:
        super().__init__(engine, after_step)
        self._started: list[tuple[str, EngineStats]] = []

    async def submit(self, request: EngineRequest) -> RequestStream:
        before = self.stats()
        try:
            return await super().submit(request)
        finally:
            self._started.append((request.request_id, before))

    def take_started(self, stats: EngineStats) -> tuple[str, ...]:
        """The requests that came in before the step that `stats` is of."""
        taken = tuple(request_id for request_id, before in self._started if before is not stats)
        self._started = [each for each in self._started if each[1] is stats]
        return taken


def _size(spec: PoolSpec, kv: KvTensors) -> PoolSize:
    num_bytes = kv.layout.bytes_per_token * spec.block_size * spec.num_blocks
    return PoolSize(spec.name, spec.num_blocks, spec.block_size, num_bytes, spec.span)


def _usage(name: str, meters: PoolMeters) -> PoolUsage:
    return PoolUsage(name, meters.total, meters.free, meters.cached, meters.in_use)
