"""The claim: from where on each pool of a request computes, out of what all of them hold.

A draft that reads the target's states starts where the target starts, so both start at the smaller depth; or, if asked
to, at the target's, with a hole in the draft's KV where its pool has less. Invariant: pages for copy-on-write are
allocated before anything is pinned; whatever is evicted meanwhile, the pools end at depths that go together, perhaps
at 0. Called by `PairedCache`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cluster.core.frontier import Frontier
from cluster.core.handle import DRAFT, TARGET, CacheHandle, Claim, Coupling
from cluster.core.holding import BlockCopy, Holding

RECLAIMS = 2
"""How often a claim is tried again at a smaller depth, before it settles for nothing."""


def frontier_of(handle: CacheHandle, depths: Sequence[int]) -> Frontier:
    """What can be reused, if the handle's pools hold so many units."""
    found = dict(zip(handle.holdings, depths, strict=True))
    most = _most(handle)
    return Frontier(
        target=min(found[TARGET], most),
        draft=min(found[DRAFT], most) if DRAFT in found else None,
        joint=min(most, *depths),
    )


def claim_pools(handle: CacheHandle, coupling: Coupling, skip_gap: bool) -> Claim:
    """Takes what is published and sets the cursors of all holdings, which are empty."""
    holdings = list(handle.holdings.values())
    wanted = _depths(handle, coupling, [holding.depth() for holding in holdings], skip_gap)
    copies: tuple[BlockCopy, ...] = ()
    for _ in range(1 + RECLAIMS):
        copies = _take(holdings, wanted)
        got = [holding.cursor for holding in holdings]
        if got == wanted:
            break
        copies = ()
        for holding in holdings:
            holding.release()
        wanted = _depths(handle, coupling, got, skip_gap)
    frontier = frontier_of(handle, [holding.found for holding in holdings])
    draft, target = handle.holdings.get(DRAFT), handle.holdings[TARGET]
    if skip_gap and coupling is Coupling.JOINT and draft is not None and draft.cursor < target.cursor:
        draft.skip_to(target.cursor)
        frontier = replace(frontier, joint=target.cursor)
    return Claim(frontier, copies)


def _take(holdings: Sequence[Holding], depths: Sequence[int]) -> tuple[BlockCopy, ...]:
    for holding, depth in zip(holdings, depths, strict=True):
        holding.prepare(depth)
    # The target last: it is the one whose depth the others bound.
    taken = [holding.take(depth) for holding, depth in zip(reversed(holdings), reversed(depths), strict=True)]
    return tuple(copy for copy in taken if copy is not None)


def _depths(handle: CacheHandle, coupling: Coupling, held: Sequence[int], skip_gap: bool) -> list[int]:
    """How many units each pool is to take, given what each holds."""
    most = _most(handle)
    if coupling is Coupling.INDEPENDENT:
        return [min(depth, most) for depth in held]
    most = min(most, *held)
    if skip_gap and DRAFT in handle.holdings:
        return _across_gap(handle, held) or [most] * len(held)
    return [most] * len(held)


def _across_gap(handle: CacheHandle, held: Sequence[int]) -> list[int] | None:
    """Depths that leave a hole of whole blocks in the draft's KV; None if it isn't a block behind the others."""
    draft = handle.holdings[DRAFT]
    others = [depth for name, depth in zip(handle.holdings, held, strict=True) if name != DRAFT]
    size, most = draft.block_size, min(_most(handle), draft.stream.n_units, *others)
    own = held[1] // size * size
    start = most // size * size
    return [own if name == DRAFT else start for name in handle.holdings] if start > held[1] else None


def _most(handle: CacheHandle) -> int:
    """Known tokens that may be reused: all but the last one, whose logits are needed."""
    return max(0, handle.tokens.n_tokens - 1)
