"""Which worker holds which raw block, in which of its pools: the scheduler's in-memory picture of the cluster.

Each block key maps to one integer with two bits per worker: its target pool holds the block, its draft pool does.
Workers publish contiguous frontiers (a block is never held without its ancestors), so each bit is monotone along a
prompt's chain of keys and a bisection finds where it ends.

Invariants: at most `max_blocks` keys, those not used for longest go first; a worker that is dropped disappears from
every answer at once, and its slot is not given to another before a sweep has erased its bits.
The picture is a hint: a wrong entry costs time, never a token. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cluster.core.frontier import BlockState
from cluster.routing.block_table import BlockTable
from cluster.routing.packed_keys import KEPT, SHORT_MASK, words

_TARGET, _DRAFT, _BOTH = 1, 2, 3
_MAX_SHARED_MASKS = 65_536
_SURVEY_STRETCHES = 64
_TOUCH_SAMPLES = 8

_Stretch = tuple[int, int, int]
"""(low, high, holders): these hold the block at `low` and not the one at `high`."""


class Depth(NamedTuple):
    """Leading blocks of a prompt that one worker holds, per pool."""

    target: int
    draft: int


NOTHING = Depth(0, 0)


class Survey(NamedTuple):
    """How deep each worker holds a chain, roughly where many end at different places; workers that hold nothing of it
    are left out."""

    depths: dict[str, Depth]
    slack: int
    """Blocks by which a depth may be too small; 0: all are exact."""


class PrefixMap:
    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}, but must be at least 1")
        self.max_blocks = max_blocks
        self._table = BlockTable(max_blocks, self._uncount)
        self._shared: dict[int, int] = {}
        """One object per distinct value of holder bits: with hundreds of workers the integers are long, and few
        differ."""
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        self._live = 0
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        self._unswept = 0
        """Shards that the sweep under way has yet to visit."""
        self._free: list[int] = []
        self._next_slot = 0

    def __len__(self) -> int:
        return len(self._table)

    def blocks_of(self, worker_id: str) -> int:
        """Blocks that the worker's target pool is believed to hold."""
        slot = self._slots.get(worker_id)
        return 0 if slot is None else self._counts[slot]

    # ---------------------------------------------------------------- workers

    def reset(self, worker_id: str) -> None:
        """Starts the worker with nothing: a new life, or a snapshot that replaces all that was known."""
        self.drop(worker_id)
        slot = self._free.pop() if self._free else self._next_slot
        self._next_slot = max(self._next_slot, slot + 1)
        self._slots[worker_id], self._names[slot], self._counts[slot] = slot, worker_id, 0
        self._live |= _BOTH << 2 * slot

    def drop(self, worker_id: str) -> None:
        """Masks the worker at once; its bits are erased by later sweeps."""
        slot = self._slots.pop(worker_id, None)
        if slot is None:
            return
        del self._names[slot], self._counts[slot]
        self._live &= ~(_BOTH << 2 * slot)
        self._retired.append(slot)

    def sweep(self, budget: int = 50_000) -> bool:
        """Erases the bits of dropped workers from about `budget` keys; returns whether more is left to do."""
        if not self._unswept:
            self._free.extend(self._sweeping)
            self._sweeping, self._retired = self._retired, []
            self._unswept = self._table.shards if self._sweeping else 0
        keep = ~sum(_BOTH << 2 * slot for slot in self._sweeping)
        while self._unswept and budget > 0:
            self._unswept -= 1
            budget -= self._table.mask(self._unswept, keep, self._share)
        return self._unswept > 0 or bool(self._retired)

    # ---------------------------------------------------------------- blocks

    def store(self, worker_id: str, states: Sequence[BlockState]) -> None:
        """Sets the state of the blocks as given. Parents come before children, and end up as more recently used.

        A cluster reports a million blocks a second, so this loop calls as little as it can: neighbours in a chain
        mostly have the same holders, before and after.
        """
        self._write(worker_id, [(each.key, each.target | each.draft << 1) for each in reversed(states)])

    def remove(self, worker_id: str, keys: Iterable[bytes]) -> None:
        self._write(worker_id, [(key, 0) for key in keys])

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks a chain as just used. Costs next to nothing for one that was used not long ago."""
        if all(map(self._table.is_fresh, keys[:: max(1, len(keys) // _TOUCH_SAMPLES)])):
            return
        for key in reversed(keys):
            self._table.refresh(key)

    def holders(self, key: bytes) -> dict[str, tuple[bool, bool]]:
        """The live workers that hold one block: name -> (target, draft)."""
        held = self._table.get(key) & self._live
        return {
            self._names[slot]: (bool(held >> 2 * slot & _TARGET), bool(held >> 2 * slot & _DRAFT))
            for slot in {bit >> 1 for bit in _bits(held)}
        }

    # ---------------------------------------------------------------- depths

    def depths(self, keys: Sequence[bytes]) -> dict[str, Depth]:
        """How deep each worker holds the chain, in blocks; workers that hold nothing of it are left out."""
        return self._name(self._stretches(keys, len(keys)))

    def survey(self, keys: Sequence[bytes]) -> Survey:
        """The same, without telling apart all of hundreds of ends: the depths are exact if few workers hold the chain.
        `refine` then finds the exact depth of a worker that matters."""
        stretches = self._stretches(keys, _SURVEY_STRETCHES)
        return Survey(self._name(stretches), max((high - low - 1 for low, high, _ in stretches), default=0))

    def refine(self, worker_id: str, keys: Sequence[bytes], depth: Depth, slack: int) -> Depth:
        """The exact depth of one worker, known to be at least `depth` and at most `slack` blocks more."""
        slot = self._slots.get(worker_id)
        if not slack or slot is None:
            return depth
        return Depth(*(self._end(keys, 2 * slot + pool, low, slack) for pool, low in enumerate(depth)))

    # ---------------------------------------------------------------- inside

    def _stretches(self, keys: Sequence[bytes], most: int) -> list[_Stretch]:
        """Where along the chain holders end: bisects level by level, until all ends are told apart or there are more
        than `most` stretches."""
        if not keys:
            return []
        young, old, shards = self._table.young, self._table.old, self._table.shards
        numbers, last = words(keys), len(keys) - 1
        first = self._table.get(keys[0]) & self._live
        to_the_end = self._table.get(keys[last]) & first
        found = [(last, last + 1, to_the_end)] if to_the_end else []
        level = [(0, last, first ^ to_the_end)] if first != to_the_end else []
        while level and len(level) <= most:
            split = []
            for stretch in level:
                low, high, bits = stretch
                middle = (low + high) >> 1
                if middle == low:
                    found.append(stretch)
                    continue
                short = numbers[middle] & SHORT_MASK
                shard = short % shards
                deeper = (young[shard].get(short) or old[shard].get(short, 0)) & bits
                if deeper:
                    split.append((middle, high, deeper))
                if deeper != bits:
                    split.append((low, middle, bits ^ deeper))
            level = split
        return found + level

    def _name(self, stretches: Iterable[_Stretch]) -> dict[str, Depth]:
        """Depths by worker. Each bit lies in one stretch, and mostly in that of the worker's other bit."""
        names, depths = self._names, dict[str, Depth]()
        for low, _, bits in stretches:
            deep = low + 1
            both = Depth(deep, deep)
            while bits:
                slot = (bits.bit_length() - 1) >> 1
                pair = bits >> 2 * slot
                bits ^= pair << 2 * slot
                if pair == _BOTH:
                    depths[names[slot]] = both
                else:
                    known = depths.get(names[slot], NOTHING)
                    target, draft = (deep, known.draft) if pair == _TARGET else (known.target, deep)
                    depths[names[slot]] = Depth(target, draft)
        return depths

    def _end(self, keys: Sequence[bytes], bit: int, low: int, slack: int) -> int:
        high = min(low + slack, len(keys)) if low else 0
        while low < high:
            middle = (low + high + 1) >> 1
            if self._table.get(keys[middle - 1]) >> bit & 1:
                low = middle
            else:
                high = middle - 1
        return low

    def _write(self, worker_id: str, blocks: Iterable[tuple[bytes, int]]) -> None:
        slot = self._slots[worker_id]
        shift, others = 2 * slot, ~(_BOTH << 2 * slot)
        table, shards, room = self._table, self._table.shards, self._table.room
        young, old = table.young, table.old
        known, known_bits, after, gain, gained = 0, 0, 0, 0, 0
        for key, bits in blocks:
            short = int.from_bytes(key[:KEPT], sys.byteorder) & SHORT_MASK
            shard = short % shards
            generation = young[shard]
            before = generation.get(short)
            if before is None:
                before = old[shard].pop(short, 0)
            if before is not known or bits != known_bits:
                known, known_bits = before, bits
                after = self._share(before & others | bits << shift)
                gain = (bits & _TARGET) - (before >> shift & _TARGET)
            gained += gain
            if after:
                generation[short] = after
                if len(generation) >= room:
                    table.turn(shard)
            else:
                generation.pop(short, None)
        self._counts[slot] += gained

    def _uncount(self, forgotten: Counter[int]) -> None:
        for held, times in forgotten.items():
            for bit in _bits(held & self._live):
                if bit % 2 == 0:
                    self._counts[bit >> 1] -= times

    def _share(self, held: int) -> int:
        if len(self._shared) > _MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(held, held)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
