"""Keeps a slow or dead Redis from slowing anything else down.

Every operation gets a time limit. After a few failures in a row the breaker opens: operations fail at once for a
while, then one is let through to try (half open), and its outcome closes or reopens the breaker, each time for
longer. Invariant: while open, no operation touches the network. One breaker belongs to one
`cluster.directory.store.Directory`.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TypeVar

from redis.exceptions import RedisError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class DirectoryDown(Exception):
    """The directory gave no answer in time, or is not asked at present. Callers go on without it."""


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Times in seconds, on `clock`."""

    def __init__(
        self,
        failures_to_open: int = 3,
        open_s: float = 0.5,
        max_open_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_to_open = failures_to_open
        self._first_open_s = open_s
        self._max_open_s = max_open_s
        self._clock = clock
        self._failures = 0
        self._open_s = open_s
        self._open_until: float | None = None
        self._probing = False

    @property
    def state(self) -> BreakerState:
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._clock() >= self._open_until else BreakerState.OPEN

    async def call(self, operation: Callable[[], Awaitable[T]], limit_s: float) -> T:
        """Runs the operation within the limit.

        Raises:
            DirectoryDown: it failed, took too long, or the breaker is open.
        """
        state = self.state
        if state is BreakerState.OPEN or (state is BreakerState.HALF_OPEN and self._probing):
            raise DirectoryDown("not asked: the breaker is open")
        self._probing = state is BreakerState.HALF_OPEN
        try:
            async with asyncio.timeout(limit_s):
                answer = await operation()
        except (RedisError, OSError, TimeoutError) as error:
            self._fail(error)
            # Only the kind: a message may quote a URL with its password.
            raise DirectoryDown(type(error).__name__) from None
        finally:
            self._probing = False
        self._succeed()
        return answer

    def _fail(self, error: Exception) -> None:
        self._failures += 1
        if self._open_until is not None:
            self._open_s = min(2 * self._open_s, self._max_open_s)
        elif self._failures < self._failures_to_open:
            return
        else:
            logger.warning("event=directory_down error=%s", type(error).__name__)
        self._open_until = self._clock() + self._open_s

    def _succeed(self) -> None:
        if self._open_until is not None:
            logger.warning("event=directory_up")
        self._failures, self._open_s, self._open_until = 0, self._first_open_s, None
