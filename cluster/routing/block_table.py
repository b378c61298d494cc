"""A bounded table from block keys to integers that forgets what wasn't used for longest, in generations.

A dict that is kept in order of use grows with churn, not with its contents: each removal leaves a hole that only a
resize closes. Here each of many shards has a young and an old dict: entries are written into the young one, and when
it is full it becomes the old one, whose contents go. So memory is flat, and no call pauses for more than one shard.

Invariants: at most `max_blocks` entries; an entry survives at least half of its shard's room in later writes. Keys are
the first 56 bits of block keys: they tell the blocks of a cluster apart well enough for a hint, in the smallest
integers that do. Owned by `cluster.routing.prefix_map`, whose hot loops read `young` and `old` themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

SHORT = 7
"""Bytes of a block key that are kept."""
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
        short = int.from_bytes(key[:SHORT], "little")
        shard = short % self.shards
        return self.young[shard].get(short) or self.old[shard].get(short, 0)

    def turn(self, shard: int) -> None:
        """The young generation of a shard is full: it becomes the old one, whose entries are forgotten."""
        if self.old[shard]:
            self._forgotten(Counter(self.old[shard].values()))
        self.old[shard], self.young[shard] = self.young[shard], {}

    def refresh(self, key: bytes) -> None:
        """Marks an entry, if it exists, as just used."""
        short = int.from_bytes(key[:SHORT], "little")
        shard = short % self.shards
        value = self.old[shard].pop(short, 0)
        if value:
            self.young[shard][short] = value
            if len(self.young[shard]) >= self.room:
                self.turn(shard)

    def is_fresh(self, key: bytes) -> bool:
        """Whether an entry is young, or doesn't exist."""
        short = int.from_bytes(key[:SHORT], "little")
        return short not in self.old[short % self.shards]

    def mask(self, shard: int, keep: int, share: Callable[[int], int]) -> int:
        """Erases all bits but `keep` from a shard's values; returns how many it looked at."""
        seen = 0
        for generation in (self.young[shard], self.old[shard]):
            seen += len(generation)
            changed = [(short, value & keep) for short, value in generation.items() if value & keep != value]
            for short, value in changed:
                if value:
                    generation[short] = share(value)
                else:
                    del generation[short]
        return seen
