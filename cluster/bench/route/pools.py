"""The two KV pools of a simulated worker: which blocks are held, by whom, and what is evicted. Sizes only, no tokens.

A block is in use (by the requests that hold it), cached (published, used by nobody) or the unpublished property of one
request, which is counted and not named. Eviction takes the cached block that was given back first; a request gives back
its deepest block first, so a block never outlives its children. This is what `cluster.core.paired_cache` does with
`LeastRecentlyUsed`, at block granularity; a test holds the two against each other.

Owned by `worker.SimWorker`, one per pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class SimPool:
    def __init__(self, capacity: int, changed: set[int]) -> None:
        """`changed` collects the blocks that were published or evicted, for the next report."""
        self.capacity = capacity
        self.evicted = 0
        self._users: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._changed = changed

    def __contains__(self, block: int) -> bool:
        return block in self._users or block in self._cached

    @property
    def in_use(self) -> int:
        return len(self._users) + self._private

    @property
    def free(self) -> int:
        return self.capacity - self.in_use - len(self._cached)

    def depth(self, chain: Sequence[int]) -> int:
        """Leading blocks of the chain that are published here."""
        users, cached = self._users, self._cached
        for depth, block in enumerate(chain):
            if block not in users and block not in cached:
                return depth
        return len(chain)

    def hold(self, blocks: Sequence[int]) -> None:
        """Takes published blocks into use."""
        users, cached = self._users, self._cached
        for block in blocks:
            if block in users:
                users[block] += 1
            else:
                del cached[block]
                users[block] = 1

    def let_go(self, blocks: Sequence[int]) -> None:
        """Gives a path of held blocks back, the deepest first."""
        users, cached = self._users, self._cached
        for block in reversed(blocks):
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                cached[block] = None

    def take(self, count: int) -> bool:
        """Makes so many blocks the caller's own, by eviction if need be; False, and nothing happens, if there aren't as
        many."""
        if count > self.capacity - self.in_use:
            return False
        for _ in range(count - self.free):
            block, _ = self._cached.popitem(last=False)
            self._changed.add(block)
            self.evicted += 1
        self._private += count
        return True

    def give_back(self, count: int) -> None:
        """Frees blocks of the caller's own."""
        self._private -= count

    def publish(self, blocks: Sequence[int]) -> None:
        """Names blocks of the caller's own, which it goes on holding. Where another request published the same block
        first, that one is held and the caller's own is freed."""
        self._private -= len(blocks)
        users, cached = self._users, self._cached
        for block in blocks:
            if block in users:
                users[block] += 1
                continue
            if block in cached:
                del cached[block]
            else:
                self._changed.add(block)
            users[block] = 1
