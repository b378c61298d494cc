"""The engine's thread, and the bridge between it and asyncio.

The thread owns the engine: everything that touches it runs there. Other threads put commands into an inbox; events
come back on the asyncio loop that submitted the request, one wake-up per step however many requests had news. A
stream merges what its reader has not fetched yet, so it never holds more than the request's output. When there is
nothing to do the thread sleeps on a condition. Called by the worker's gRPC service and by the worker actor.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.engine.stats import EngineStats
from cluster.errors import CapacityExceeded, Unavailable

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MAX_COMMANDS = 4096


class RequestStream(AsyncIterator[RequestEvent]):
    """Events of one request, for one reader on the asyncio loop that submitted it; ends after `finish`."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.home = asyncio.get_running_loop()
        self._pending: RequestEvent | None = None
        self._news = asyncio.Event()
        self._ended = False

    def put(self, event: RequestEvent) -> None:
        """Add an event; on the home loop only."""
        self._pending = event if self._pending is None else self._pending.then(event)
        self._news.set()

    async def __anext__(self) -> RequestEvent:
        """All that happened since the last call, as one event."""
        if self._ended:
            raise StopAsyncIteration
        await self._news.wait()
        self._news.clear()
        event, self._pending = self._pending, None
        if event is None:
            raise RuntimeError("a request stream has one reader")
        self._ended = event.finish is not None
        return event


class EngineLoop:
    """Runs `engine` in a thread of its own until `shutdown`.

    `after_step(engine)` is called on the thread after every step and command, to pick up reports; it must not block.
    """

    def __init__(self, engine: Engine, after_step: Callable[[Engine], None] | None = None) -> None:
        self._engine = engine
        self._after_step = after_step
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._streams: dict[str, RequestStream] = {}
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread runs and takes requests."""
        return self._thread.is_alive() and not self._stopping

    def stats(self) -> EngineStats:
        """The engine's numbers after the latest step; from any thread."""
        return self._stats

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Hand a request to the engine. Raises what `Engine.add` raises, or Unavailable after `shutdown`."""
        compiled = None
        if request.sampling.grammar is not None:  # the engine's thread would wait for it; others may want the same one
            compiling = self._engine.parts.grammars.prepare(request.sampling.grammar)
            compiled = await asyncio.shield(asyncio.wrap_future(compiling))
        stream = RequestStream(request.request_id)

        def add(engine: Engine) -> None:
            engine.add(request, compiled)
            self._streams[request.request_id] = stream

        try:
            await self.call(add)
        except asyncio.CancelledError:
            self.cancel(request.request_id)
            raise
        return stream

    def cancel(self, request_id: str) -> None:
        """End a request; its stream gets its last event. Unknown and finished ids are ignored. From any thread."""
        try:
            self._post(lambda: self._engine.cancel(request_id))
        except Unavailable:
            return

    async def call(self, function: Callable[[Engine], _T]) -> _T:
        """Run `function(engine)` on the engine's thread between two steps, and return what it returns."""
        done: Future[_T] = Future()

        def command() -> None:
            if not done.set_running_or_notify_cancel():
                return
            try:
                done.set_result(function(self._engine))
            except Exception as error:  # whatever it is belongs to the caller
                done.set_exception(error)

        self._post(command)
        return await asyncio.wrap_future(done)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Cancel what runs, let the streams end, and stop the thread. Idempotent; from any thread but the engine's."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self._stopping:
                raise Unavailable("The worker is shutting down: send the request again.")
            if len(self._inbox) >= _MAX_COMMANDS:
                raise CapacityExceeded(f"The worker has {_MAX_COMMANDS} commands waiting: try again in a second.")
            self._inbox.append(command)
            self._wake.notify()

    def _run(self) -> None:
        while self._await_work():
            self._run_commands()
            self._publish(self._step())
        self._run_commands()
        self._engine.cancel_all()
        self._publish(self._engine.step())
        self._engine.close()

    def _step(self) -> list[RequestEvent]:
        try:
            return self._engine.step()
        except Exception:  # a defect in planning, or a failed audit; the next requests deserve a worker
            return self._engine.fail_all()

    def _await_work(self) -> bool:
        """Sleep until there is a command or the engine has work; False when it is time to stop."""
        with self._wake:
            while not (self._stopping or self._inbox or self._engine.has_work()):
                self._wake.wait()
            return not self._stopping

    def _run_commands(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _publish(self, events: Sequence[RequestEvent]) -> None:
        self._stats = self._engine.stats()
        if self._after_step is not None:
            try:
                self._after_step(self._engine)
            except Exception:
                _log.exception("event=after_step_failed")
        homes: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, RequestEvent]]] = {}
        for event in events:
            stream = (
                self._streams.get(event.request_id)
                if event.finish is None
                else self._streams.pop(event.request_id, None)
            )
            if stream is not None:
                homes.setdefault(stream.home, []).append((stream, event))
        for home, news in homes.items():
            try:
                home.call_soon_threadsafe(_deliver, news)
            except RuntimeError:  # the reader's loop is closed: nobody is left to tell
                for stream, _ in news:
                    self._engine.cancel(stream.request_id)


def _deliver(news: list[tuple[RequestStream, RequestEvent]]) -> None:
    for stream, event in news:
        stream.put(event)
