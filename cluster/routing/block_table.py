"""A bounded table from block keys to integers that forgets what wasn't used for longest, in generations.

A dict that is kept in order of use grows with churn, not with its contents: each removal leaves a hole that only a
resize closes. Here each of many shards has a young and an old dict: entries are written into the young one, and when
it is full it becomes the old one, whose contents go. So memory is flat, and no call pauses for more than one shard.

Invariants: at most `max_blocks` entries; an entry survives at least half of its shard's room in later writes. It is
owned by `cluster.routing.prefix_map`, whose hot loops read `young` and `old` themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from cluster.routing.packed_keys import short

_ROOM = 21_845
"""Entries that a dict of 2**15 places holds before it grows: where its memory per entry is least."""


class BlockTable:
    def __init__(self, max_blocks: int, forgotten: Callable[[Counter[int]], None]) -> None:
        """`forgotten` hears which values went because of the limit, and how often each."""
        self.shards = max(1, -(-max_blocks // (2 * _ROOM)))
        self.room = max(1, max_blocks // (2 * self.shards))
        """Entries in a generation of a shard."""
        self.young: list[dict[int, int]] = [{} for _ in range(self.shards)]
        self.old: list[dict[int, int]] = [{} for _ in range(self.shards)]
        self._forgotten = forgotten

    def __len__(self) -> int:
        return sum(map(len, self.young)) + sum(map(len, self.old))

    def get(self, key: bytes) -> int:
        """The value of a block; 0 if there is none."""
        number = short(key)
        shard = number % self.shards
        return self.young[shard].get(number) or self.old[shard].get(number, 0)

    def turn(self, shard: int) -> None:
        """The young generation of a shard is full: it becomes the old one, whose entries are forgotten."""
        if self.old[shard]:
            self._forgotten(Counter(self.old[shard].values()))
        self.old[shard], self.young[shard] = self.young[shard], {}

    def refresh(self, key: bytes) -> None:
        """Marks an entry, if it exists, as just used."""
        number = short(key)
        shard = number % self.shards
        value = self.old[shard].pop(number, 0)
        if value:
            self.young[shard][number] = value
            if len(self.young[shard]) >= self.room:
                self.turn(shard)

    def is_fresh(self, key: bytes) -> bool:
        """Whether an entry is young, or doesn't exist."""
        number = short(key)
        return number not in self.old[number % self.shards]

    def mask(self, shard: int, keep: int, share: Callable[[int], int]) -> int:
        """Erases all bits but `keep` from a shard's values; returns how many it looked at."""
        seen = 0
        for generation in (self.young[shard], self.old[shard]):
            seen += len(generation)
            changed = [(number, value & keep) for number, value in generation.items() if value & keep != value]
            for number, value in changed:
                if value:
                    generation[number] = share(value)
                else:
                    del generation[number]
        return seen
