"""Prompts that were just placed: blocks that a worker doesn't report yet, but will hold once it has run them.

Without it, requests with the same new prefix that follow each other within its prefill would each find nobody. A
promise is found by the keys of its blocks at depths 1, 2, 4, ... and at its end, so that keeping one takes a handful
of steps however long the prompt is; the exact depth that two prompts share is then bisected, as keys are chained.

Invariant: a promise ends at its time, or with its worker; at most `limit` are kept, the oldest go first. It is a hint
like everything here. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cluster.routing.prefix_map import NOTHING, Depth

_MOST_COMPARED = 24
"""Promises that a lookup compares a prompt with; where more begin alike, the youngest."""


@dataclass(frozen=True, slots=True, eq=False)
class _Promise:
    worker_id: str
    keys: Sequence[bytes]
    draft: bool
    """Whether the draft pool will hold it too."""
    until: float


class Promises:
    def __init__(self, limit: int = 65_536) -> None:
        self._limit = limit
        self._kept: OrderedDict[_Promise, None] = OrderedDict()
        self._marks: dict[bytes, dict[_Promise, None]] = {}
        """Key of a marked block -> the promises that reach it, oldest first."""

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, worker_id: str, keys: Sequence[bytes], draft: bool, until: float) -> None:
        if not keys:
            return
        promise = _Promise(worker_id, keys, draft, until)
        self._kept[promise] = None
        for depth in _marks(len(keys)):
            self._marks.setdefault(keys[depth - 1], {})[promise] = None
        if len(self._kept) > self._limit:
            self._end(next(iter(self._kept)))

    def drop(self, worker_id: str) -> None:
        """Its promises are void."""
        for promise in [promise for promise in self._kept if promise.worker_id == worker_id]:
            self._end(promise)

    def depths(self, keys: Sequence[bytes], now: float) -> dict[str, Depth]:
        """How deep each worker will hold the chain, in blocks, by what was promised."""
        found: dict[str, Depth] = {}
        ended = []
        for promise, low, high in self._alike(keys):
            if promise.until <= now:
                ended.append(promise)
                continue
            known = found.get(promise.worker_id, NOTHING)
            if known.target >= high and (known.draft >= high or not promise.draft):
                continue
            depth = _shared(promise.keys, keys, low, high)
            found[promise.worker_id] = Depth(max(known.target, depth), max(known.draft, depth if promise.draft else 0))
        for promise in ended:
            self._end(promise)
        return found

    def expire(self, now: float) -> None:
        for promise in [promise for promise in self._kept if promise.until <= now]:
            self._end(promise)

    def _alike(self, keys: Sequence[bytes]) -> Iterator[tuple[_Promise, int, int]]:
        """Promises that begin like the chain, and between which depths the two part; the deepest marks first."""
        seen: set[_Promise] = set()
        deeper = len(keys)
        for depth in reversed(list(_marks(len(keys)))):
            for promise in reversed(self._marks.get(keys[depth - 1], {})):
                if promise not in seen:
                    seen.add(promise)
                    yield promise, depth, min(deeper, len(promise.keys))
                    if len(seen) >= _MOST_COMPARED:
                        return
            deeper = depth

    def _end(self, promise: _Promise) -> None:
        del self._kept[promise]
        for depth in _marks(len(promise.keys)):
            key = promise.keys[depth - 1]
            reaching = self._marks[key]
            del reaching[promise]
            if not reaching:
                del self._marks[key]


def _marks(length: int) -> Iterator[int]:
    """Depths at which a chain of so many blocks is marked."""
    depth = 1
    while depth < length:
        yield depth
        depth *= 2
    if length:
        yield length


def _shared(one: Sequence[bytes], other: Sequence[bytes], low: int, high: int) -> int:
    """Leading blocks that two chains share, known to be from `low` to `high`. Keys are chained: where one is equal, all
    before it are."""
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
