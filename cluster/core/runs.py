"""Runs, the nodes of a prefix tree, and how a stream is matched against them.

A run is a stretch of consecutive published blocks that isn't forked inside. Its children are sorted by their heads (the
units of their first block), and no head is a prefix of another; so the child that shares most with a stream is always a
neighbour of the place where the stream's own head would stand. In a pool with a sliding window, a run may outlive its
blocks: `gone` runs keep the place of what comes after them. Values and pure functions; `PrefixTree` owns the runs.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from operator import attrgetter

from cluster.core.keys import WORD, KeyStream


class Run:
    """A stretch of published blocks: `units` are their packed words, `names` the raw block keys that they complete.

    `start` is the index of the first block in the sequence. `users` is the number of holdings whose path goes through
    here, `readers` of those that still read it: all, where there is no window. The root of a scope is a run without
    blocks."""

    __slots__ = (
        "blocks",
        "children",
        "gone",
        "head",
        "names",
        "parent",
        "readers",
        "root",
        "score",
        "start",
        "units",
        "users",
    )

    def __init__(self, parent: Run | None, root: bytes, start: int, width: int, units: bytearray) -> None:
        self.parent = parent
        self.root = root
        self.start = start
        self.head = bytes(units[:width])
        self.units = units
        self.blocks: list[int] = []
        self.names: list[bytes] = []
        self.children: list[Run] = []
        self.users = 0
        self.readers = 0
        self.gone = False
        self.score = 0.0

    @property
    def end(self) -> int:
        """Index of the block that comes after."""
        return self.start + len(self.blocks)


HEAD = attrgetter("head")
"""Sort key of siblings."""


@dataclass(frozen=True, slots=True)
class Match:
    """How far a stream is published: `blocks` full blocks, the last `inside` of them in `run`, then `partial` units
    of block `source`, which can be copied."""

    run: Run | None
    inside: int
    blocks: int
    source: int | None
    partial: int

    def depth(self, block_size: int) -> int:
        """Units matched."""
        return self.blocks * block_size + self.partial


NOTHING = Match(None, 0, 0, None, 0)


def match_below(run: Run, stream: KeyStream) -> Match:
    """The longest prefix of the stream, in units, that is published below the root `run`."""
    packed, at, width, blocks = stream.buffer.packed, stream.offset, WORD * stream.block_size, 0
    while True:
        child, common = closest(run, bytes(packed[at : at + width]))
        if child is None or common < width:
            if child is None or child.gone or common < WORD:
                return Match(run, len(run.blocks), blocks, None, 0)
            return Match(run, len(run.blocks), blocks, child.blocks[0], common // WORD)
        if not packed.startswith(child.units, at):
            break
        run = child
        at += len(child.units)
        blocks += len(child.blocks)
    inside = common_blocks(child.units, packed, at, width)
    block = child.units[inside * width : (inside + 1) * width]
    at += inside * width
    partial = common_prefix(block, packed[at : at + width]) // WORD
    if child.gone or not partial:
        return Match(child, inside, blocks + inside, None, 0)
    return Match(child, inside, blocks + inside, child.blocks[inside], partial)


def within_window(match: Match, window: int, size: int, most: int) -> Match:
    """The longest part of `match` from which a request can go on: of the `window` - 1 units before the place where
    it ends, or before `most` if that comes first, none is gone."""
    run = match.run
    first = match.blocks
    while run is not None:
        if not run.gone:
            first = run.start
        elif min(match.depth(size), most) - window + 1 >= first * size:
            return match
        else:
            above = run.parent
            match = Match(above, 0 if above is None else len(above.blocks), run.start, None, 0)
            first = run.start
        run = run.parent
    return match


def path_to(leaf: Run) -> list[Run]:
    """Runs from the root to `leaf`."""
    runs: list[Run] = []
    run: Run | None = leaf
    while run is not None:
        runs.append(run)
        run = run.parent
    runs.reverse()
    return runs


def blocks_to(leaf: Run) -> list[int]:
    """Blocks from the root to the end of `leaf`."""
    blocks: list[int] = []
    for run in path_to(leaf):
        blocks += run.blocks
    return blocks


def names_to(leaf: Run) -> list[bytes]:
    """The raw block keys that these blocks complete."""
    names: list[bytes] = []
    for run in path_to(leaf):
        names += run.names
    return names


def name_before(run: Run, index: int) -> bytes | None:
    """The raw key that precedes name `index` of a run."""
    above: Run | None = run
    while above is not None and not index:
        above = above.parent
        index = len(above.names) if above is not None else 0
    return above.names[index - 1] if above is not None else None


def closest(run: Run, head: bytes) -> tuple[Run | None, int]:
    """The child that shares the longest prefix with `head`, and the length of that prefix in bytes."""
    children = run.children
    at = bisect_left(children, head, key=HEAD)
    best, longest = None, 0
    for child in children[max(0, at - 1) : at + 1]:
        common = common_prefix(child.head, head)
        if common > longest:
            best, longest = child, common
    return best, longest


def common_prefix(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Number of leading bytes that are equal."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differing & -differing).bit_length() - 1) // 8 if differing else size


def common_blocks(units: bytearray, packed: bytearray, at: int, width: int) -> int:
    """Number of leading blocks of `units` that `packed` repeats from byte `at` on; the first is known to be one."""
    low, high = 1, len(units) // width
    with memoryview(units) as view:
        while low < high:
            middle = (low + high + 1) // 2
            if packed.startswith(view[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle - 1
    return low
