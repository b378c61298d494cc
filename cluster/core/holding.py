"""What one request holds in one pool: its block table, and how far its KV there is computed.

The table's first `published` blocks lie in the pool's tree and may have other readers; the rest is the request's own.
Positions below `cursor` have valid KV. Positions below `published * block_size` must not be written: where they are
computed again (for logits or hidden states), the KV goes to a trash block.

A draft may start behind a hole: blocks that nobody computes for this request, because its pool has them no longer. The
table names the trash block there, whose id is one past the pool's last. In a pool with a sliding window, blocks that
are wholly behind it are let go: shared ones are no longer read, own ones make room for a hole.

Invariants: cursor <= capacity and cursor <= the stream's known units, so what is published was computed from known
tokens only; nothing after a hole is published, since it was computed without what belongs there. Driven by
`PairedCache`, which keeps the holdings of one request in step."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.block_pool import BlockPool
from cluster.core.keys import KeyStream
from cluster.core.runs import NOTHING, Match, Run, blocks_to, names_to, within_window


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the first `units` positions of block `src` to block `dst` in the tensors of `pool`, before the next
    forward."""

    pool: str
    src: int
    dst: int
    units: int


class Holding:
    """Starts empty; `raw` is the stream that names published blocks in reports, or None where nothing is reported."""

    __slots__ = (
        "_match",
        "_matched_at",
        "_page",
        "_raw",
        "_weight",
        "block_size",
        "cursor",
        "first",
        "found",
        "hole",
        "leaf",
        "pool",
        "published",
        "reuse",
        "stream",
        "table",
    )

    def __init__(self, pool: BlockPool, stream: KeyStream, raw: KeyStream | None, reuse: bool, weight: float) -> None:
        self.pool = pool
        self.block_size = pool.spec.block_size
        self.stream = stream
        self.reuse = reuse
        self.leaf: Run | None = None
        self.table: list[int] = []
        self.published = 0
        self.cursor = 0
        self.found = 0
        """Units that the last claim found published."""
        self.first = 0
        """Blocks before this one aren't read any more."""
        self.hole: range | None = None
        """Positions below the cursor that have no KV, from the end of the published blocks on."""
        self._raw = raw
        self._weight = weight
        self._page: int | None = None
        self._match = NOTHING
        self._matched_at = (-1, -1)

    @property
    def held(self) -> int:
        """Positions below this one lie in blocks that others may read."""
        return self.published * self.block_size

    @property
    def capacity(self) -> int:
        """Positions that the block table covers."""
        return len(self.table) * self.block_size

    @property
    def own(self) -> list[int]:
        """Blocks that only this request holds."""
        return self.table[self._own_from :]

    @property
    def _own_from(self) -> int:
        return self.published if self.hole is None else self.hole.stop // self.block_size

    @property
    def lacks_context(self) -> bool:
        """Whether the next token would see positions in the hole."""
        return self.hole is not None and self.hole.stop > self.pool.spec.first_seen(self.cursor) * self.block_size

    # ------------------------------------------------------------ claiming

    def match(self) -> Match:
        """What is published of the stream now. Looked up once for each state of the tree and of the stream."""
        state = self.pool.tree.version, self.stream.n_units
        if state != self._matched_at:
            self._match = self.pool.tree.match(self.stream) if self.reuse else NOTHING
            self._matched_at = state
        return self._match

    def match_to(self, most: int) -> Match:
        """What is published of the stream now and can be used up to `most` units, or to where it ends."""
        match, window = self.match(), self.pool.spec.window
        return match if window is None else within_window(match, window, self.block_size, most)

    def depth(self, most: int) -> int:
        """Units of the stream that are published now and can be used; `most` at most."""
        return min(most, self.match_to(most).depth(self.block_size))

    def prepare(self, depth: int) -> None:
        """Takes the page that a claim of `depth` units copies to, if it ends inside a block that isn't published in
        full. Without a page to be had, the claim will end at the last full block."""
        if depth > self.match_to(depth).blocks * self.block_size:
            pages = self.pool.allocate(1)
            self._page = pages[0] if pages else None

    def take(self, depth: int) -> BlockCopy | None:
        """Claims up to `depth` units, and says what must be copied. `cursor` tells how many it really got.

        Full blocks that match beyond `depth` are shared too: they needn't be stored twice, only computed past.
        """
        page, self._page = self._page, None
        self.found = self.depth(self.stream.n_units)
        match = self.match_to(depth)
        if page is None:
            match = self.match_to(min(depth, match.blocks * self.block_size))
        full = match.blocks * self.block_size
        self.cursor = min(depth, match.depth(self.block_size) if page is not None else full)
        if match.blocks:
            self._share(match)
        if page is None or match.source is None or self.cursor <= full:
            self.pool.give_back(() if page is None else (page,))
            return None
        self.table.append(page)
        return BlockCopy(self.pool.spec.name, match.source, page, self.cursor - full)

    def _share(self, match: Match) -> None:
        self.first = self.pool.spec.first_seen(self.cursor)
        self.leaf = self.pool.tree.claim(match, self.stream.root or b"", self.first)
        self.table = blocks_to(self.leaf)
        self.published = match.blocks
        if self._raw is not None and self._raw.n_keys < self.held // self._raw.block_size:
            self._raw.adopt_keys(names_to(self.leaf))

    def skip_to(self, position: int) -> None:
        """Leaves a hole of whole blocks between what was claimed, which ended with a block, and `position`, which
        begins one."""
        if position > self.cursor:
            self.hole = range(self.cursor, position)
            self.table += [self.pool.spec.num_blocks] * (len(self.hole) // self.block_size)
            self.cursor = position

    def release(self) -> None:
        """Gives everything back: published blocks stay cached in the tree, the others become free."""
        self.pool.give_back(self.own)
        if self.leaf is not None:
            self.pool.tree.release(self.leaf, self._weight, self.first)
            self.leaf = None
        self.table = []
        self.published = self.cursor = self.found = self.first = 0
        self.hole = None

    # ------------------------------------------------------------ growing

    def missing(self, width: int) -> int:
        """Blocks to add so that the table covers `width` positions beyond the cursor."""
        short = -(-(self.cursor + width) // self.block_size) - len(self.table)
        return short if short > 0 else 0

    def grow(self, blocks: int) -> bool:
        """Adds blocks at the end of the table; False, and nothing happens, if the pool hasn't as many."""
        if blocks:
            taken = self.pool.allocate(blocks)
            if taken is None:
                return False
            self.table += taken
        return True

    def shrink(self, blocks: int) -> None:
        """Takes blocks off the end of the table; never those that hold committed positions."""
        keep = max(len(self.table) - blocks, self.published, -(-self.cursor // self.block_size))
        if keep < len(self.table):
            self.pool.give_back(self.table[keep:])
            del self.table[keep:]

    def check_advance(self, computed: int) -> None:
        """Raises ValueError if `computed` more positions exceed the capacity or depend on tokens that aren't known."""
        cursor = self.cursor + computed
        if computed < 0 or cursor > len(self.table) * self.block_size or cursor > self.stream.n_units:
            raise ValueError(
                f"{computed} positions computed beyond {self.cursor} in pool {self.pool.spec.name!r}, but only"
                f" {self.capacity} are reserved and {self.stream.n_units} are determined by known tokens"
            )

    def advance(self, computed: int) -> None:
        """`computed` more positions have valid KV: publishes the blocks that this completes, gives back what lies
        wholly beyond."""
        self.cursor += computed
        complete = self.cursor // self.block_size
        if complete > self.published and self.reuse and self.hole is None:
            self._publish(complete)
        self.shrink(len(self.table))
        if self.pool.spec.window is not None:
            self._let_go(self.pool.spec.window)

    def _let_go(self, window: int) -> None:
        """Lets go of blocks that are wholly behind the window, a window's worth at a time: runs stay long."""
        seen = self.pool.spec.first_seen(self.cursor)
        if seen - self.first < self.pool.spec.blocks_for(window):
            return
        if self.leaf is not None and self.first < self.published:
            self.pool.tree.leave(self.leaf, self.first, min(seen, self.published))
        if seen > self._own_from:
            self.pool.give_back(self.table[self._own_from : seen])
            self.hole = range(self.held, seen * self.block_size)
            self.table[self.published : seen] = [self.pool.spec.num_blocks] * (seen - self.published)
        self.first = seen

    def _publish(self, complete: int) -> None:
        own = self.table[self.published : complete]
        self.leaf, kept = self.pool.tree.publish(self._leaf(), self.stream, self.published, own, self._raw)
        if kept != own:
            # Someone published equal blocks first: read theirs, and free ours. Tables are read anew each step.
            self.table[self.published : complete] = kept
            self.pool.give_back([mine for mine, theirs in zip(own, kept, strict=True) if mine != theirs])
        self.published = complete

    def publish_tail(self) -> None:
        """Publishes the last, partial block, if anything in it is computed. The request must be released next."""
        if self.cursor <= self.held or not self.reuse or self.hole is not None:
            return
        units = self.stream.words(self.held, self.cursor)
        if self.pool.tree.publish_tail(self._leaf(), units, self.table[self.published], self._weight):
            del self.table[self.published]

    def _leaf(self) -> Run:
        if self.leaf is None:
            self.leaf = self.pool.tree.claim(NOTHING, self.stream.root or b"")
        return self.leaf
