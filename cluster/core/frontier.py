"""How deep pools hold a token sequence, and the reports by which a worker tells the cluster what it holds.

The cluster knows raw block keys only (`keys.raw_block_keys`). For each raw block a worker reports whether its target
pool holds it, and whether its draft pool does, for any successor. `ledger.py` turns what the trees publish and evict
into reports.

Invariants: stored blocks come after their parents, and a block isn't reported as held while its parent isn't;
applying a report twice changes nothing; a snapshot replaces all that was known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frontier:
    """Tokens of one sequence that can be reused from the target pool, from the draft pool (None: it takes no part),
    and jointly. A pool computes from its own depth on where cursors are independent, and from `joint` on where they
    are not; that lies above `draft` where a claim left a hole in the draft's KV."""

    target: int
    draft: int | None
    joint: int


@dataclass(frozen=True, slots=True)
class BlockState:
    """One raw block: its key, its parent's (None for the first), its index in the sequence, and which pools hold it."""

    key: bytes
    parent: bytes | None
    depth: int
    target: bool
    draft: bool


@dataclass(frozen=True, slots=True)
class FrontierReport:
    """Changes since the report before it (`seq` - 1), or all that is held if `snapshot`.

    `stored` gives the present state of blocks that at least one pool holds, parents first; `removed` the keys of blocks
    that none holds any longer. `epoch` names the life of the worker; `seq` starts at 1.
    """

    worker: str
    epoch: int
    seq: int
    stored: tuple[BlockState, ...]
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False


class TreeListener:
    """Told what a tree publishes and evicts: chains of raw block keys, the first of index `depth` and below
    `parent`."""

    def stored(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        """These are held once more."""

    def removed(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        """These are held once less."""
