"""What a router is to the simulation: it places requests, and hears what a router of its kind would hear.

Invariant: a policy learns about workers only through these calls, never by looking at them. Implemented in `balancing`,
`approximate`, `informed` and `product`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.bench.route.request import SimRequest


@dataclass(frozen=True, slots=True)
class News:
    """What a worker says of itself, at most every 20 ms."""

    running: int
    waiting: int
    prefill_tokens: int
    arrived: tuple[int, ...]
    """Numbers of the requests that came since the last news: the load contains them."""
    blocks: list[tuple[int, bool, bool]]
    """Blocks published or evicted since: number, held by the target pool, held by the draft pool. Parents first."""
    in_use: tuple[int, int]
    """Blocks of the target pool and of the draft pool that requests hold."""
    free: tuple[int, int]
    capacity: int
    """Blocks of each pool."""


class Policy(Protocol):
    @property
    def wants_news(self) -> bool:
        """Whether workers' news mean anything to it."""

    def place(self, request: SimRequest, now: float) -> int:
        """The index of the worker that gets the request, which it gets at once."""

    def news(self, worker: int, news: News, now: float) -> None:
        """A worker reports."""

    def first_token(self, worker: int, request: SimRequest, now: float) -> None:
        """A request's prefill has ended."""

    def ended(self, worker: int, request: SimRequest, now: float) -> None:
        """A request has ended."""


class Deaf:
    """What a policy does that hears nothing: to be inherited from."""

    @property
    def wants_news(self) -> bool:
        return False

    def news(self, worker: int, news: News, now: float) -> None:
        return

    def first_token(self, worker: int, request: SimRequest, now: float) -> None:
        return

    def ended(self, worker: int, request: SimRequest, now: float) -> None:
        return
