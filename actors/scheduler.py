"""The scheduler's process: the router behind Ray calls, and its copy in the directory.

Owns the clock and the background work; every decision is `cluster.routing.router`'s. Invariants: requests and reports
are handled on one asyncio loop, each in one synchronous step; the directory is written in the background and read,
within 20 ms, only while the router's own picture has gaps. Created and watched by `actors.supervisor`; loses nothing
that it can't get back from the workers.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field

import ray
from pydantic import SecretStr

from actors.member import Loaded
from cluster.core.frontier import FrontierReport
from cluster.directory.breaker import DirectoryDown
from cluster.directory.schema import AnchorHolder, Schema, worker_tag
from cluster.directory.store import Directory
from cluster.errors import TandemError
from cluster.gateway.dispatcher import ClusterState
from cluster.observe.logging import event, setup
from cluster.routing.decisions import Explanation
from cluster.routing.policy import CostModel
from cluster.routing.report_order import Verdict
from cluster.routing.router import HeartbeatReply, Hints, Router, RouterLimits
from cluster.routing.types import DispatchQuery, Placement, Refusal, WorkerInfo, WorkerLoad

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_MAX_PENDING_ANCHORS = 100_000


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    redis_url: SecretStr
    schema: Schema = field(default_factory=Schema)
    limits: RouterLimits = field(default_factory=RouterLimits)
    costs: CostModel = field(default_factory=CostModel)
    log_level: str = "info"


@ray.remote
class SchedulerActor:
    def __init__(self, options: SchedulerOptions) -> None:
        setup(options.log_level)
        self._options = options
        self._router = Router(options.limits, options.costs, random.Random())
        self._directory = Directory(options.redis_url, options.schema, lease_s=options.limits.lease_s)
        self._loaded = asyncio.Event()
        self._grace_ends = 0.0
        self._announced: set[str] = set()
        self._flushed: set[str] = set()
        """Workers whose anchors the directory lost: they are to send everything again."""
        self._anchors: dict[bytes, int] = {}
        """Anchor blocks to be written to the directory, with their depth in blocks."""

    async def load(self) -> Loaded:
        """Takes the workers in that the directory knows, so that requests can be placed before they report."""
        try:
            known = await self._directory.workers()
        except DirectoryDown as down:
            logger.warning(event("warm_start_failed", error=str(down)))
            known = []
        for info in known:
            self._register(info, last_seq=1)
        self._grace_ends = time.monotonic() + self._options.limits.lease_s
        self._loaded.set()
        logger.info(event("scheduler_ready", pid=os.getpid(), workers_known=len(known)))
        return Loaded(os.getpid())

    async def run(self) -> None:
        """Does the background work, for as long as the process lives."""
        announce_at = 0.0
        while True:
            for info in self._router.expire(time.monotonic()):
                await self._forget(info.worker_id, info.epoch, "lease_expired")
            # While the directory is down, the breaker says so; what was not written follows with later reports.
            with suppress(DirectoryDown):
                if time.monotonic() >= announce_at:
                    announce_at = time.monotonic() + self._options.limits.lease_s / 3
                    await self._announce()
                await self._write_anchors()
            await asyncio.sleep(_TICK_S)

    # ---------------------------------------------------------------- workers

    async def register(self, info: WorkerInfo, last_seq: int) -> TandemError | None:
        """Returns why the worker can't be taken in, if so: as a value, because an exception would arrive wrapped."""
        refusal = self._register(info, last_seq)
        logger.info(event("worker_registered", worker=info.worker_id, epoch=info.epoch, refusal=refusal))
        return refusal

    async def heartbeat(self, worker_id: str, epoch: int, load: WorkerLoad) -> HeartbeatReply:
        reply = self._router.heartbeat(worker_id, epoch, load, time.monotonic())
        if worker_id in self._flushed:
            self._flushed.discard(worker_id)
            return HeartbeatReply(reply.registered, want_snapshot=True)
        return reply

    async def report(self, report: FrontierReport) -> bool:
        """Returns whether a snapshot is wanted."""
        verdict = self._router.apply(report)
        if verdict is Verdict.APPLY:
            self._note_anchors(report)
        return verdict is Verdict.GAP

    async def suspect(self, worker_id: str, epoch: int) -> None:
        """A gateway could not reach it: no request goes there before it is heard of again."""
        self._router.suspect(worker_id, epoch)

    async def lose(self, worker_id: str, epoch: int) -> None:
        """That life of the worker has ended: no request goes there any more."""
        if self._router.lose(worker_id, epoch):
            await self._forget(worker_id, epoch, "process_ended")

    # ---------------------------------------------------------------- requests

    async def dispatch(self, query: DispatchQuery) -> Placement | Refusal:
        """Places a request. A scheduler that has just started lets it wait for the workers to register again."""
        await self._loaded.wait()
        while True:
            hints = await self._hints(query) if self._router.incomplete(query.model) else None
            answer = self._router.dispatch(query, time.monotonic(), hints)
            if isinstance(answer, Placement) or answer.saturated or time.monotonic() > self._grace_ends:
                return answer
            await asyncio.sleep(_TICK_S / 2)

    async def explain(self, request_id: str, tenant: str) -> tuple[Explanation, ...]:
        """How a recent request was placed; nothing if another life of the scheduler did it."""
        return self._router.explain(request_id, tenant, time.monotonic())

    async def state(self) -> ClusterState:
        return ClusterState(tuple(self._router.status(time.monotonic())), self._directory.up)

    # ---------------------------------------------------------------- inside

    def _register(self, info: WorkerInfo, last_seq: int) -> TandemError | None:
        try:
            self._router.register(info, last_seq, time.monotonic())
        except TandemError as refusal:
            return refusal
        return None

    async def _hints(self, query: DispatchQuery) -> Hints | None:
        infos = [status.info for status in self._router.status(time.monotonic())]
        try:
            return await self._directory.hints(query.keys, infos)
        except DirectoryDown:
            return None

    async def _announce(self) -> None:
        infos = [status.info for status in self._router.status(time.monotonic())]
        absent = await self._directory.announce(infos)
        self._flushed |= absent & self._announced
        self._announced = {info.worker_id for info in infos}

    async def _forget(self, worker_id: str, epoch: int, reason: str) -> None:
        logger.warning(event("worker_lost", worker=worker_id, epoch=epoch, reason=reason))
        self._announced.discard(worker_id)
        with suppress(DirectoryDown):  # if it stays there, its lease ends by itself
            await self._directory.forget(worker_id)

    def _note_anchors(self, report: FrontierReport) -> None:
        for state in report.stored:
            if self._options.schema.is_anchor(state.depth) and len(self._anchors) < _MAX_PENDING_ANCHORS:
                self._anchors[state.key] = state.depth + 1

    async def _write_anchors(self) -> None:
        if not self._anchors:
            return
        anchors, self._anchors = self._anchors, {}
        epochs = {status.info.worker_id: status.info.epoch for status in self._router.status(time.monotonic())}
        await self._directory.put_anchors(
            {
                key: [
                    AnchorHolder(worker_tag(name), epochs[name], target * depth, draft * depth)
                    for name, (target, draft) in self._router.map.holders(key).items()
                ]
                for key, depth in anchors.items()
            }
        )
