"""The published blocks of one pool, as a tree over exact units.

A run is a stretch of consecutive blocks that were published together and aren't forked inside; the tree is made of
runs, so a prompt of 2,000 blocks is matched, claimed and released in a handful of steps. Under each root (one per
reuse scope and leading window) runs are found by comparing units, byte for byte: there is no hash that could collide.
A block's sha256 key is only its name in reports. A partial tail is a run of one block with fewer units; it is only
ever copied from.

    root ── [b0 b1 b2 b3] ─┬─ [b4 b5]          heads of siblings are sorted, and none is a prefix of another,
                           └─ [b6 b7 b8] ── [tail]      so the closest partial match is always a neighbour

Invariants: a run that is in use (`users` > 0) has ancestors that are in use; unused runs are in the eviction policy, in
use ones are not; evictions take the end of a run that has no children, so every block's ancestors are there.
Owned by a `BlockPool`; called by `Holding`. Not thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from cluster.core.eviction import EvictionPolicy, LeastRecentlyUsed
from cluster.core.keys import WORD, KeyStream


class Run:
    """A stretch of published blocks: `units` are their packed words, `names` the raw block keys that they complete.

    `start` is the index of the first block in the sequence; `users` the number of holdings whose path goes through
    here. The root of a scope is a run without blocks."""

    __slots__ = ("blocks", "children", "head", "names", "parent", "root", "score", "start", "units", "users")

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
        self.score = 0.0


_HEAD = attrgetter("head")


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


class TreeListener:
    """Told what a tree publishes and evicts: chains of raw block keys, the first of index `depth` and below
    `parent`."""

    def stored(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        """These are held once more."""

    def removed(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        """These are held once less."""


class PrefixTree:
    """Blocks that the tree gives up go to `free`. `name_size` is the block size of the raw keys that blocks complete;
    it differs from the pool's where the two pools' block sizes do."""

    def __init__(
        self,
        block_size: int,
        free: list[int],
        name_size: int | None = None,
        policy: EvictionPolicy[Run] | None = None,
        listener: TreeListener | None = None,
    ) -> None:
        self.block_size = block_size
        self.free = free
        self.cached = 0
        """Blocks that nobody uses: they can be evicted."""
        self.used = 0
        """Blocks in use by at least one holding."""
        self.roots: dict[bytes, Run] = {}
        self._width = WORD * block_size
        self._name_size = block_size if name_size is None else name_size
        self._policy: EvictionPolicy[Run] = LeastRecentlyUsed() if policy is None else policy
        self._listener = TreeListener() if listener is None else listener

    # ------------------------------------------------------------ looking

    def match(self, stream: KeyStream) -> Match:
        """The longest published prefix of the stream, in units. Changes nothing, recency included."""
        root = stream.root
        run = None if root is None else self.roots.get(root)
        if run is None:
            return NOTHING
        packed, at, width, blocks = stream.buffer.packed, stream.offset, self._width, 0
        while True:
            child, common = _closest(run, bytes(packed[at : at + width]))
            if child is None or common < width:
                partial = common // WORD
                return Match(run, len(run.blocks), blocks, child.blocks[0] if child and partial else None, partial)
            if not packed.startswith(child.units, at):
                break
            run = child
            at += len(child.units)
            blocks += len(child.blocks)
        inside = _common_blocks(child.units, packed, at, width)
        block = child.units[inside * width : (inside + 1) * width]
        at += inside * width
        partial = _common_prefix(block, packed[at : at + width]) // WORD
        return Match(child, inside, blocks + inside, child.blocks[inside] if partial else None, partial)

    def runs(self) -> Iterator[Run]:
        """All runs, parents before children."""
        pending = list(self.roots.values())
        while pending:
            run = pending.pop()
            pending += run.children
            yield run

    def named_chains(self) -> Iterator[tuple[list[bytes], bytes | None, int]]:
        """What is held, as reports name it: chains of raw block keys, their parent, and the index of the first."""
        for run in self.runs():
            if run.names:
                yield run.names, _name_before(run, 0), self._name_index(run.start)

    # ------------------------------------------------------------ using

    def claim(self, match: Match, root: bytes) -> Run:
        """Marks the full blocks of a fresh `match` as used; returns the run that ends with the last of them."""
        run = match.run
        if run is None:
            run = self.roots.get(root) or self._new_root(root)
        elif match.inside < len(run.blocks):
            run = self._split(run, match.inside)
        each: Run | None = run
        while each is not None:
            self._use(each)
            each = each.parent
        return run

    def release(self, leaf: Run, weight: float = 1.0) -> None:
        """Takes back one use of every run from the root to `leaf`."""
        score = self._policy.score(weight)
        run: Run | None = leaf
        while run is not None:
            parent = run.parent
            run.score = max(run.score, score)
            run.users -= 1
            if not run.users:
                self._disuse(run)
            run = parent

    def path(self, leaf: Run) -> tuple[list[int], list[bytes]]:
        """Blocks from the root to the end of `leaf`, and the raw block keys they complete."""
        runs: list[Run] = []
        run: Run | None = leaf
        while run is not None:
            runs.append(run)
            run = run.parent
        runs.reverse()
        return [block for each in runs for block in each.blocks], [name for each in runs for name in each.names]

    # ------------------------------------------------------------ publishing

    def publish(
        self, leaf: Run, stream: KeyStream, start: int, blocks: Sequence[int], raw: KeyStream | None = None
    ) -> tuple[Run, list[int]]:
        """Adds full blocks [start, start + len(blocks)) of `stream` below `leaf`, the caller's used path.

        Returns the path's new end and the blocks that the tree holds for this stretch: where equal blocks are
        published already these are other ones, and the caller must use them instead of its own. `raw` names the
        blocks in reports."""
        width = self._width
        units = stream.words(start * self.block_size, (start + len(blocks)) * self.block_size)
        kept: list[int] = []
        while len(kept) < len(blocks):
            done = len(kept)
            child, common = _closest(leaf, bytes(units[done * width : (done + 1) * width]))
            if child is None or common < width:
                if child is not None and common == len(child.head):
                    self._cut(child, 0)
                leaf = self._grow(leaf, units[done * width :], blocks[done:], raw)
                return leaf, kept + list(blocks[done:])
            same = _common_blocks(child.units, units, done * width, width)
            leaf = self._split(child, same) if same < len(child.blocks) else child
            self._use(leaf)
            kept += leaf.blocks
        return leaf, kept

    def publish_tail(self, leaf: Run, units: bytearray, block: int, weight: float = 1.0) -> bool:
        """Adds a block of which only `units` are known, at least one and fewer than all, below `leaf`, which is in use.

        False if the tree holds these units already; the block stays the caller's then.
        """
        closest, common = _closest(leaf, bytes(units))
        if closest is not None and common == len(units):
            return False
        if closest is not None and common == len(closest.head):
            self._cut(closest, 0)
        tail = self._insert(leaf, units, [block])
        tail.score = self._policy.score(weight)
        self.cached += 1
        self._policy.add(tail)
        return True

    # ------------------------------------------------------------ evicting

    def evict(self, count: int) -> None:
        """Gives up `count` unused blocks, or all there are."""
        while count > 0 and (run := self._policy.victim()) is not None:
            taken = min(count, len(run.blocks))
            self._cut(run, len(run.blocks) - taken)
            count -= taken

    # ------------------------------------------------------------ inside

    def _new_root(self, root: bytes) -> Run:
        run = self.roots[root] = Run(None, root, 0, self._width, bytearray())
        return run

    def _use(self, run: Run) -> None:
        if not run.users:
            self._policy.remove(run)
            self.cached -= len(run.blocks)
            self.used += len(run.blocks)
        run.users += 1

    def _disuse(self, run: Run) -> None:
        self.used -= len(run.blocks)
        self.cached += len(run.blocks)
        if run.parent is None and not run.children:
            del self.roots[run.root]
        else:
            self._policy.add(run)

    def _grow(self, leaf: Run, units: bytearray, blocks: Sequence[int], raw: KeyStream | None) -> Run:
        """Lengthens `leaf` where nobody else uses it and nothing follows it, or else adds a run below it."""
        if leaf.parent is not None and leaf.users == 1 and not leaf.children:
            run = leaf
            first = run.start + len(run.blocks)
            run.units += units
            run.blocks += blocks
        else:
            run = self._insert(leaf, units, list(blocks))
            run.users = 1
            first = run.start
        self.used += len(blocks)
        if raw is not None:
            start, end = self._name_index(first), self._name_index(first + len(blocks))
            names = raw.block_keys(start, end)
            run.names += names
            self._listener.stored(names, raw.block_key(start - 1) if start else None, start)
        return run

    def _insert(self, parent: Run, units: bytearray, blocks: list[int]) -> Run:
        run = Run(parent, parent.root, parent.start + len(parent.blocks), self._width, units)
        run.blocks = blocks
        insort(parent.children, run, key=_HEAD)
        return run

    def _split(self, run: Run, at: int) -> Run:
        """Cuts a run in two before its block `at` and returns the new upper part, which the caller is about to use."""
        parent, width = run.parent, self._width
        upper = Run(parent, run.root, run.start, width, run.units[: at * width])
        siblings = parent.children if parent is not None else []
        siblings[bisect_left(siblings, run.head, key=_HEAD)] = upper
        named = self._name_index(run.start + at) - self._name_index(run.start)
        upper.blocks, run.blocks = run.blocks[:at], run.blocks[at:]
        upper.names, run.names = run.names[:named], run.names[named:]
        upper.children, upper.users, upper.score = [run], run.users, run.score
        run.parent, run.start = upper, run.start + at
        run.units = run.units[at * width :]
        run.head = bytes(run.units[:width])
        return upper

    def _cut(self, run: Run, keep: int) -> None:
        """Gives up all but the first `keep` blocks of an unused run without children, and the run itself if none is
        kept."""
        named = self._name_index(run.start + keep) - self._name_index(run.start)
        cut, names = run.blocks[keep:], run.names[named:]
        if names:
            self._listener.removed(names, _name_before(run, named), self._name_index(run.start + keep))
        self.cached -= len(cut)
        self.free += cut
        if keep:
            del run.blocks[keep:], run.names[named:], run.units[keep * self._width :]
        else:
            self._remove(run)

    def _remove(self, run: Run) -> None:
        self._policy.remove(run)
        if run.parent is None:
            del self.roots[run.root]
        else:
            siblings = run.parent.children
            del siblings[bisect_left(siblings, run.head, key=_HEAD)]

    def _name_index(self, block: int) -> int:
        """Raw blocks that end at or before the start of this pool's block `block`."""
        return block * self.block_size // self._name_size

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Raises RuntimeError if an invariant is broken. For tests and audits: it looks at every run."""
        cached = used = 0
        for run in self.runs():
            cached += 0 if run.users else len(run.blocks)
            used += len(run.blocks) if run.users else 0
            problem = self._problem(run)
            if problem is not None:
                raise RuntimeError(f"prefix tree: {problem} (run at block {run.start} with {len(run.blocks)} blocks)")
        if (cached, used) != (self.cached, self.used):
            raise RuntimeError(f"prefix tree: counts {self.cached} cached, {self.used} used; holds {cached}, {used}")

    def _problem(self, run: Run) -> str | None:
        heads = [child.head for child in run.children]
        if any(second.startswith(first) for first, second in pairwise(heads)) or heads != sorted(heads):
            return "heads of siblings are unsorted, or one is a prefix of another"
        if sum(child.users for child in run.children) > run.users:
            return "fewer users than the children have"
        if (run in self._policy) != (run.users == 0):
            return "in use and evictable, or neither"
        if any(child.score > run.score for child in run.children if not run.users):
            return "a child would outlive its parent"
        if any(child.parent is not run or child.start != run.start + len(run.blocks) for child in run.children):
            return "a child doesn't follow on its parent"
        if run.parent is not None and not run.head:
            return "no units"
        return None


def _name_before(run: Run, index: int) -> bytes | None:
    """The raw key that precedes name `index` of a run."""
    above: Run | None = run
    while above is not None and not index:
        above = above.parent
        index = len(above.names) if above is not None else 0
    return above.names[index - 1] if above is not None else None


def _closest(run: Run, head: bytes) -> tuple[Run | None, int]:
    """The child that shares the longest prefix with `head`, and the length of that prefix in bytes."""
    children = run.children
    at = bisect_left(children, head, key=_HEAD)
    best, longest = None, 0
    for child in children[max(0, at - 1) : at + 1]:
        common = _common_prefix(child.head, head)
        if common > longest:
            best, longest = child, common
    return best, longest


def _common_prefix(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Number of leading bytes that are equal."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differing & -differing).bit_length() - 1) // 8 if differing else size


def _common_blocks(units: bytearray, packed: bytearray, at: int, width: int) -> int:
    """Number of leading blocks of `units` that `packed` repeats from byte `at` on; at least the first is known to
    be."""
    low, high = 1, len(units) // width
    with memoryview(units) as view:
        while low < high:
            middle = (low + high + 1) // 2
            if packed.startswith(view[low * width : middle * width], at + low * width):
                low = middle
            else:
                high = middle - 1
    return low
