"""Ctrl-C, SIGTERM and SIGHUP around the start and the stop of a cluster.

Invariant: a signal during `Interrupts` is never lost, although Python may raise it where exceptions are dropped (a
finalizer, a fork hook); a signal during `uninterrupted` does nothing. Outside the main thread, which alone gets
signals, both do nothing. Used by `actors.cluster`.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_Handler = Callable[[int, FrameType | None], object]


class Interrupts:
    """Remembers signals while it passes them on; `check` acts on one whose exception got lost."""

    def __init__(self) -> None:
        self._pending: Callable[[], object] | None = None
        self._previous: dict[signal.Signals, _Handler] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._previous[number] = handler
                    signal.signal(number, self._remember)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def check(self) -> None:
        """Raises what the handler of a signal that has come since the beginning raises."""
        if self._pending is not None:
            self._pending()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        handler = self._previous[signal.Signals(number)]
        self._pending = lambda: handler(number, None)
        handler(number, frame)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignores signals meanwhile, so that a second Ctrl-C can't leave half of a cluster behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)
