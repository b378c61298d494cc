"""One request's hold on the pools: its handle, what a claim gave it, and what is reserved for the step under way.

Invariant: all holdings of a handle have one status, the handle's, so its caches can't be in different states.
Changed by `PairedCache` only; the engine reads cursors and block tables from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.core.frontier import Frontier
from cluster.core.holding import BlockCopy, Holding
from cluster.core.keys import TokenBuffer

TARGET, DRAFT = "target", "draft"
"""Names of the two pools that matter most."""


class Coupling(StrEnum):
    """How the cursors of a request's pools are tied.

    NONE: there is no draft pool. JOINT: the draft reads the target's hidden states, so both start at the smaller depth.
    INDEPENDENT: the draft computes from tokens alone, and each pool starts at its own depth.
    """

    NONE = "none"
    JOINT = "joint"
    INDEPENDENT = "independent"


class HandleStatus(StrEnum):
    """IDLE holds no block, CLAIMED may hold some, CLOSED never will again."""

    IDLE = "idle"
    CLAIMED = "claimed"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim found, and the copies to carry out, in order, before the next forward."""

    frontier: Frontier
    copies: tuple[BlockCopy, ...]


@dataclass(slots=True, eq=False)
class Reservation:
    """Blocks that each pool gave for one step; given back once, by `revert`, or in part by `commit`."""

    handle: CacheHandle
    taken: tuple[int, ...]
    open: bool = True


@dataclass(slots=True, eq=False)
class CacheHandle:
    """One request's hold on the pools it uses. Pools are named "target", "draft", or as their spec says."""

    request_id: str
    tokens: TokenBuffer
    holdings: dict[str, Holding]
    status: HandleStatus = HandleStatus.IDLE
    reservation: Reservation | None = None

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools that this request uses, the target first."""
        return tuple(self.holdings)

    @property
    def has_hole(self) -> bool:
        """Whether the draft's KV lacks positions that its next token would see."""
        draft = self.holdings.get(DRAFT)
        return draft is not None and draft.lacks_context

    def cursor(self, pool: str) -> int:
        """Positions whose KV is computed and valid. KeyError if the request doesn't use the pool."""
        return self.holdings[pool].cursor

    def held(self, pool: str) -> int:
        """Positions below this one lie in shared blocks: when computed again, their KV must go to the trash block."""
        return self.holdings[pool].held

    def first_read(self, pool: str) -> int:
        """Positions below this one lie wholly behind the pool's window: their blocks may have been given away."""
        return self.holdings[pool].first * self.holdings[pool].block_size

    def block_table(self, pool: str) -> Sequence[int]:
        """Block ids by position // block_size. Valid until the next operation on the cache: read it anew each step."""
        return self.holdings[pool].table
