"""A worker's news to the scheduler: heartbeats, and numbered reports of what its pools hold.

Invariants: reports are numbered and sent in the order in which the pools changed, one at a time; heartbeats go out in
regular intervals, whatever the engine and the reports are doing, sooner when the load changed, and say which report was
the last. A report that can't be delivered is not kept: the gap in the numbers makes the scheduler ask for a snapshot.
Used by the worker actor, on its asyncio loop; only `collect` and `load_changed` are called on the engine's thread.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from actors.handles import SchedulerClient
from cluster.core.frontier import FrontierReport
from cluster.core.ledger import FrontierChanges, FrontierReporter
from cluster.errors import Unavailable
from cluster.routing.types import WorkerInfo, WorkerLoad

HEARTBEAT_S = 0.5
_MAX_UNSENT = 1024
_PAUSE_S = 0.02
"""At least, between two messages of a kind: steps that follow each other closely are told together."""


class Reporting:
    """`load(last_seq)` is what the next heartbeat says; `snapshot()` has everything put through `collect`."""

    def __init__(
        self,
        info: WorkerInfo,
        scheduler: SchedulerClient,
        load: Callable[[int], WorkerLoad],
        snapshot: Callable[[], Awaitable[None]],
    ) -> None:
        self._info = info
        self._scheduler = scheduler
        self._load = load
        self._snapshot = snapshot
        self._numbers = FrontierReporter(info.worker_id, info.epoch)
        self._unsent: deque[FrontierChanges] = deque()
        self._news = asyncio.Event()
        self._load_news = asyncio.Event()
        self._home = asyncio.get_running_loop()
        self._snapshot_wanted = False

    def collect(self, changes: FrontierChanges) -> None:
        """Takes what changed in the pools. May be called from any thread, but from one at a time."""
        if changes.stored or changes.removed or changes.complete:
            self._unsent.append(changes)
            self._home.call_soon_threadsafe(self._news.set)

    def load_changed(self) -> None:
        """Has the next heartbeat sent soon. May be called from any thread."""
        self._home.call_soon_threadsafe(self._load_news.set)

    async def run(self) -> None:
        """Registers and reports until cancelled. Raises what the scheduler refuses the worker with."""
        await asyncio.gather(self._send_heartbeats(), self._send_reports())

    async def _send_heartbeats(self) -> None:
        self._load_news.set()  # the first one goes out at once, and is answered with the request to register
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._load_news.wait()
            self._load_news.clear()
            try:
                reply = await self._scheduler.heartbeat(
                    self._info.worker_id, self._info.epoch, self._load(self._numbers.seq)
                )
                if not reply.registered:
                    await self._scheduler.register(self._info, self._numbers.seq)
                if reply.want_snapshot:
                    self._want_snapshot()
            except Unavailable:
                pass  # it is restarting, and will ask for what it missed
            await asyncio.sleep(_PAUSE_S)

    async def _send_reports(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            if self._snapshot_wanted or len(self._unsent) > _MAX_UNSENT:
                self._snapshot_wanted = False
                self._unsent.clear()  # the snapshot says it all
                await self._snapshot()
            while self._unsent:
                report = self._numbers.report(self._unsent.popleft())
                if report is not None:
                    await self._send(report)
            await asyncio.sleep(_PAUSE_S)

    async def _send(self, report: FrontierReport) -> None:
        try:
            if await self._scheduler.report(report):
                self._want_snapshot()
        except Unavailable:
            return

    def _want_snapshot(self) -> None:
        self._snapshot_wanted = True
        self._news.set()
