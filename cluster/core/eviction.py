"""In which order a pool's cached runs are given up.

A policy holds the runs that nobody uses any more. Whoever stops using a path of the tree raises the score of every
run on it to at least `score(weight)` and adds the unused ones from the deepest upwards. So a run's score is never
below its children's, and children are added before their parents; a policy that keeps to either order never names a
run that still has descendants, and nothing in the tree becomes unreachable. Owned by `PrefixTree`."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush
from math import log2
from typing import Protocol, TypeVar


class Scored(Protocol):
    """What a policy sees of a run."""

    @property
    def score(self) -> float: ...


R = TypeVar("R", bound=Scored)


class EvictionPolicy(Protocol[R]):
    """Order of unused runs."""

    def score(self, weight: float) -> float:
        """The score of a path that is released now; `weight` (> 0, 1 is ordinary) says how much its user matters."""

    def add(self, run: R) -> None:
        """The run is unused, or was just used in passing."""

    def remove(self, run: R) -> None:
        """The run is in use again, or gone. Unknown runs are ignored."""

    def victim(self) -> R | None:
        """The run to shorten next, which stays in the policy; None if all are in use."""

    def __contains__(self, run: object) -> bool:
        """Whether the run counts as unused. For checks."""


class LeastRecentlyUsed(EvictionPolicy[R]):
    """The run that was added first goes first. O(1); weights don't matter."""

    def __init__(self) -> None:
        self._order: OrderedDict[R, None] = OrderedDict()

    def score(self, weight: float) -> float:
        return 0.0

    def add(self, run: R) -> None:
        self._order[run] = None
        self._order.move_to_end(run)

    def remove(self, run: R) -> None:
        self._order.pop(run, None)

    def victim(self) -> R | None:
        return next(iter(self._order), None)

    def __contains__(self, run: object) -> bool:
        return run in self._order


class DecayingPriority(EvictionPolicy[R]):
    """The run of the least priority goes first, where priority starts at the user's weight and halves with every
    `half_life` releases that follow.

    All priorities decay alike, so their order never changes while runs wait: weight 2^k counts as k half-lives of
    recency. With equal weights this is least recently used. O(log n).
    """

    def __init__(self, half_life: int = 1024) -> None:
        if half_life < 1:
            raise ValueError(f"half_life is {half_life}, but must be at least 1 release")
        self._half_life = half_life
        self._now = 0
        self._tickets = 0
        self._current: dict[R, int] = {}
        self._heap: list[tuple[float, int, R]] = []

    def score(self, weight: float) -> float:
        self._now += 1
        return self._now + self._half_life * log2(weight)

    def add(self, run: R) -> None:
        self._tickets += 1
        self._current[run] = self._tickets
        heappush(self._heap, (run.score, self._tickets, run))
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapify(self._heap)

    def remove(self, run: R) -> None:
        self._current.pop(run, None)

    def victim(self) -> R | None:
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def __contains__(self, run: object) -> bool:
        return run in self._current

    def _is_current(self, entry: tuple[float, int, R]) -> bool:
        return self._current.get(entry[2]) == entry[1]
