"""The published blocks of one pool, as a tree over exact units.

The tree is made of runs (`runs.py`), so a prompt of 2,000 blocks is matched, claimed and released in a handful of
steps. Under each root (one per reuse scope and leading window) runs are found by comparing units, byte for byte: there
is no hash that could collide. A block's sha256 key is only its name in reports. A partial tail is a run of one block
with fewer units; it is only ever copied from.

    root ── [b0 b1 b2 b3] ─┬─ [b4 b5]          heads of siblings are sorted, and none is a prefix of another,
                           └─ [b6 b7 b8] ── [tail]      so the closest partial match is always a neighbour

Where the pool has a sliding window, whoever uses a path reads only the end of it. What nobody reads can be evicted,
used or not, children or not: the run stays in its place without its blocks.

Invariants: a run that is in use (`users` > 0) has ancestors that are in use; runs that nobody reads are in the eviction
policy, others are not; a run without blocks has descendants or users. So without a window evictions take the end of a
run that has no children, and every block's ancestors are there. Owned by a `BlockPool`; called by `Holding`. Not
thread-safe.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence

from cluster.core.eviction import EvictionPolicy, LeastRecentlyUsed
from cluster.core.frontier import TreeListener
from cluster.core.keys import WORD, KeyStream
from cluster.core.runs import HEAD, NOTHING, Match, Run, closest, common_blocks, match_below, name_before


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
        """Blocks that nobody reads: they can be evicted."""
        self.used = 0
        """Blocks that at least one holding reads."""
        self.version = 0
        """Grows with every change of what a match would find."""
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
        return NOTHING if run is None else match_below(run, stream)

    def evictable(self, run: Run) -> bool:
        """Whether the run counts as one that nobody reads. For checks."""
        return run in self._policy

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
                yield run.names, name_before(run, 0), self._name_index(run.start)

    # ------------------------------------------------------------ using

    def claim(self, match: Match, root: bytes, first: int = 0) -> Run:
        """Marks the full blocks of a fresh `match` as used; returns the run that ends with the last of them. Blocks
        before `first` aren't read."""
        run = match.run
        if run is None:
            run = self.roots.get(root) or self._new_root(root)
        elif match.inside < len(run.blocks):
            run = self._split(run, match.inside)
        each: Run | None = run
        while each is not None:
            if each.start < first < each.end:
                self._keep_unread(self._split(each, first - each.start))
            each.users += 1
            if each.end > first or each.parent is None:
                self._read(each)
            else:
                self._keep_unread(each)
            each = each.parent
        return run

    def release(self, leaf: Run, weight: float = 1.0, first: int = 0) -> None:
        """Takes back one use of every run from the root to `leaf`, of which blocks before `first` weren't read."""
        score = self._policy.score(weight)
        run: Run | None = leaf
        while run is not None:
            parent = run.parent
            run.score = max(run.score, score)
            run.users -= 1
            if run.end > first or parent is None:
                self._unread(run)
            if run.gone and not run.users and not run.children:
                self._cut(run, 0)
            run = parent

    def leave(self, leaf: Run, first: int, end: int) -> None:
        """Whoever uses the path to `leaf` reads its blocks [first, end) no longer; a block begins a run at `first`."""
        run: Run | None = leaf
        while run is not None and run.end > first:
            if run.start < end:
                upper = self._split(run, end - run.start) if end < run.end else run
                self._unread(upper)
                run = upper
            run = run.parent

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
            child, common = closest(leaf, bytes(units[done * width : (done + 1) * width]))
            if child is None or common < width:
                if child is not None and common == len(child.head):
                    self._cut(child, 0)
                leaf = self._grow(leaf, units[done * width :], blocks[done:], raw)
                return leaf, kept + list(blocks[done:])
            same = common_blocks(child.units, units, done * width, width)
            leaf = self._split(child, same) if same < len(child.blocks) else child
            leaf.users += 1
            if leaf.gone:
                leaf.gone, leaf.blocks = False, list(blocks[done : done + len(leaf.blocks)])
                self.cached += len(leaf.blocks)
                self.version += 1
            self._read(leaf)
            kept += leaf.blocks
        return leaf, kept

    def publish_tail(self, leaf: Run, units: bytearray, block: int, weight: float = 1.0) -> bool:
        """Adds a block of which only `units` are known, at least one and fewer than all, below `leaf`, which is in use.

        False if the tree holds these units already; the block stays the caller's then.
        """
        sibling, common = closest(leaf, bytes(units))
        if sibling is not None and common == len(units):
            return False
        if sibling is not None and common == len(sibling.head):
            self._cut(sibling, 0)
        tail = self._insert(leaf, units, [block])
        self.version += 1
        tail.score = self._policy.score(weight)
        self.cached += 1
        self._policy.add(tail)
        return True

    # ------------------------------------------------------------ evicting

    def evict(self, count: int) -> None:
        """Gives up `count` blocks that nobody reads, or all there are."""
        while count > 0 and (run := self._policy.victim()) is not None:
            taken = min(count, len(run.blocks))
            if run.users or run.children:
                self._drop(self._split(run, taken) if taken < len(run.blocks) else run)
            else:
                self._cut(run, len(run.blocks) - taken)
            count -= taken

    # ------------------------------------------------------------ inside

    def _new_root(self, root: bytes) -> Run:
        run = self.roots[root] = Run(None, root, 0, self._width, bytearray())
        return run

    def _read(self, run: Run) -> None:
        if not run.readers:
            self._policy.remove(run)
            self.cached -= len(run.blocks)
            self.used += len(run.blocks)
        run.readers += 1

    def _unread(self, run: Run) -> None:
        run.readers -= 1
        if not run.readers:
            self.used -= len(run.blocks)
            self.cached += len(run.blocks)
            if run.parent is None and not run.children:
                del self.roots[run.root]
            else:
                self._policy.add(run)

    def _keep_unread(self, run: Run) -> None:
        """A run that is used in passing, perhaps after it was split."""
        if not run.readers and not run.gone:
            self._policy.add(run)

    def _grow(self, leaf: Run, units: bytearray, blocks: Sequence[int], raw: KeyStream | None) -> Run:
        """Lengthens `leaf` where nobody else uses it and nothing follows it, or else adds a run below it."""
        if leaf.parent is not None and leaf.users == leaf.readers == 1 and not leaf.children:
            run = leaf
            first = run.start + len(run.blocks)
            run.units += units
            run.blocks += blocks
        else:
            run = self._insert(leaf, units, list(blocks))
            run.users = run.readers = 1
            first = run.start
        self.version += 1
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
        insort(parent.children, run, key=HEAD)
        return run

    def _split(self, run: Run, at: int) -> Run:
        """Cuts a run in two before its block `at` and returns the new upper part, which the caller is about to use."""
        self.version += 1
        parent, width = run.parent, self._width
        upper = Run(parent, run.root, run.start, width, run.units[: at * width])
        siblings = parent.children if parent is not None else []
        siblings[bisect_left(siblings, run.head, key=HEAD)] = upper
        named = self._name_index(run.start + at) - self._name_index(run.start)
        upper.blocks, run.blocks = run.blocks[:at], run.blocks[at:]
        upper.names, run.names = run.names[:named], run.names[named:]
        upper.children, upper.users, upper.score = [run], run.users, run.score
        upper.readers, upper.gone = run.readers, run.gone
        run.parent, run.start = upper, run.start + at
        run.units = run.units[at * width :]
        run.head = bytes(run.units[:width])
        return upper

    def _cut(self, run: Run, keep: int) -> None:
        """Gives up all but the first `keep` blocks of an unused run without children, or the run if that is 0."""
        named = self._name_index(run.start + keep) - self._name_index(run.start)
        cut, names = run.blocks[keep:], run.names[named:]
        if names:
            self._listener.removed(names, name_before(run, named), self._name_index(run.start + keep))
        self.version += 1
        if not run.gone:
            self.cached -= len(cut)
            self.free += cut
        if keep:
            del run.blocks[keep:], run.names[named:], run.units[keep * self._width :]
        else:
            self._remove(run)

    def _drop(self, run: Run) -> None:
        """Gives up the blocks of a run that others follow, or whose users read it no longer."""
        self.version += 1
        self._policy.remove(run)
        self.cached -= len(run.blocks)
        self.free += run.blocks
        run.gone = True

    def _remove(self, run: Run) -> None:
        self._policy.remove(run)
        if run.parent is None:
            del self.roots[run.root]
        else:
            parent = run.parent
            del parent.children[bisect_left(parent.children, run.head, key=HEAD)]
            if (parent.gone or parent.parent is None) and not parent.users and not parent.children:
                self._cut(parent, 0)

    def _name_index(self, block: int) -> int:
        """Raw blocks that end at or before the start of this pool's block `block`."""
        return block * self.block_size // self._name_size
