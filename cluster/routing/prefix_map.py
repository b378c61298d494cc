"""Which worker holds which raw block, in which of its pools: the scheduler's in-memory picture of the cluster.

Each block key maps to one integer with two bits per worker: its target pool holds the block, its draft pool does.
Workers publish contiguous frontiers (a block is never held without its ancestors), so each bit is monotone along a
prompt's chain of keys and a bisection finds where it ends.

Invariants: at most `max_blocks` keys, the least recently used go first; a worker that is dropped disappears from every
answer at once, and its slot is not given to another before a sweep has erased its bits.
The picture is a hint: a wrong entry costs time, never a token. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from cluster.core.frontier import BlockState

_TARGET, _DRAFT, _BOTH = 1, 2, 3
_MAX_SHARED_MASKS = 65_536


class Depth(NamedTuple):
    """Leading blocks of a prompt that one worker holds, per pool."""

    target: int
    draft: int


NOTHING = Depth(0, 0)


class PrefixMap:
    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks is {max_blocks}, but must be at least 1")
        self.max_blocks = max_blocks
        self._holders: dict[int, int] = {}
        """Short key -> holder bits, in order of last use."""
        self._shared: dict[int, int] = {}
        """One object per distinct value of holder bits: with hundreds of workers the integers are long, and few
        differ."""
        self._slots: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        self._live = 0
        self._retired: list[int] = []
        self._sweep = _Sweep((), ())
        self._free: list[int] = []
        self._next_slot = 0

    def __len__(self) -> int:
        return len(self._holders)

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

    # ---------------------------------------------------------------- blocks

    def store(self, worker_id: str, states: Sequence[BlockState]) -> None:
        """Sets the state of the blocks as given. Parents come before children, and end up as more recently used."""
        shift = 2 * self._slots[worker_id]
        for state in reversed(states):
            bits = (_TARGET if state.target else 0) | (_DRAFT if state.draft else 0)
            self._set(_short(state.key), shift, bits)
        while len(self._holders) > self.max_blocks:
            self._forget(next(iter(self._holders)))

    def remove(self, worker_id: str, keys: Iterable[bytes]) -> None:
        shift = 2 * self._slots[worker_id]
        for key in keys:
            self._set(_short(key), shift, 0)

    def depths(self, keys: Sequence[bytes]) -> dict[str, Depth]:
        """How deep each worker holds the chain, in blocks; workers that hold nothing of it are left out."""
        ends = self._ends(keys)
        return {
            self._names[slot]: Depth(ends.get(2 * slot, 0), ends.get(2 * slot + 1, 0))
            for slot in {bit >> 1 for bit in ends}
        }

    def touch(self, keys: Sequence[bytes]) -> None:
        """Marks a chain as just used. Free of charge while the map is less than half full: nothing is about to be
        evicted."""
        if 2 * len(self._holders) < self.max_blocks:
            return
        for key in reversed(keys):
            short = _short(key)
            held = self._holders.pop(short, None)
            if held is not None:
                self._holders[short] = held

    def holders(self, key: bytes) -> dict[str, tuple[bool, bool]]:
        """The live workers that hold one block: name -> (target, draft)."""
        held = self._holders.get(_short(key), 0) & self._live
        return {
            self._names[slot]: (bool(held >> 2 * slot & _TARGET), bool(held >> 2 * slot & _DRAFT))
            for slot in {bit >> 1 for bit in _bits(held)}
        }

    def sweep(self, budget: int = 50_000) -> bool:
        """Erases the bits of dropped workers from up to `budget` keys; returns whether more is left to do."""
        if self._sweep.done:
            self._free.extend(self._sweep.slots)
            self._sweep = _Sweep(tuple(self._holders) if self._retired else (), tuple(self._retired))
            self._retired.clear()
        keep = ~self._sweep.mask
        for short in self._sweep.take(budget):
            held = self._holders.get(short)
            if held is not None and held & keep != held:
                self._replace(short, held & keep)
        return not self._sweep.done or bool(self._retired)

    # ---------------------------------------------------------------- inside

    def _ends(self, keys: Sequence[bytes]) -> dict[int, int]:
        """Holder bit -> how many leading blocks of the chain it holds, for every bit that holds any.

        With hundreds of holders at different depths this loop is the cost of a placement, so it calls nothing.
        """
        ends: dict[int, int] = {}
        if not keys:
            return ends
        held, last = self._holders.get, len(keys) - 1
        first = held(_short(keys[0]), 0) & self._live
        to_the_end = held(_short(keys[last]), 0) & first
        # Each stretch: `bits` hold the block at `low` and not the one at `high`; the last block holds the one after it.
        stretches = [(last, last + 1, to_the_end), (0, last, first ^ to_the_end)]
        while stretches:
            low, high, bits = stretches.pop()
            while bits and high - low > 1:
                middle = (low + high) >> 1
                deeper = held(int.from_bytes(keys[middle][:8], "little"), 0) & bits
                if deeper:
                    stretches.append((middle, high, deeper))
                high, bits = middle, bits ^ deeper
            while bits:
                bit = bits.bit_length() - 1
                ends[bit] = low + 1
                bits ^= 1 << bit
        return ends

    def _set(self, short: int, shift: int, bits: int) -> None:
        before = self._holders.pop(short, 0)
        after = before & ~(_BOTH << shift) | bits << shift
        self._counts[shift // 2] += (bits & _TARGET) - (before >> shift & _TARGET)
        if after:
            self._holders[short] = self._share(after)

    def _replace(self, short: int, held: int) -> None:
        if held:
            self._holders[short] = self._share(held)
        else:
            del self._holders[short]

    def _forget(self, short: int) -> None:
        for bit in _bits(self._holders.pop(short) & self._live):
            if bit % 2 == 0:
                self._counts[bit >> 1] -= 1

    def _share(self, held: int) -> int:
        if len(self._shared) > _MAX_SHARED_MASKS:
            self._shared.clear()
        return self._shared.setdefault(held, held)


class _Sweep:
    """One pass over the keys that existed when it began; the slots become free when it ends."""

    def __init__(self, keys: tuple[int, ...], slots: tuple[int, ...]) -> None:
        self.slots = slots
        self.mask = sum(_BOTH << 2 * slot for slot in slots)
        self._left = len(keys)
        self._keys = iter(keys)

    @property
    def done(self) -> bool:
        return self._left == 0

    def take(self, budget: int) -> Iterator[int]:
        self._left -= min(budget, self._left)
        return islice(self._keys, budget)


def _short(key: bytes) -> int:
    # 64 bits tell the blocks of a cluster apart well enough for a hint, at a third of the memory of the whole digest.
    return int.from_bytes(key[:8], "little")


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
