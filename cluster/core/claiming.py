"""The claim: from where on each pool of a request computes, out of what all of them hold.

A draft that reads the target's states starts where the target starts, so both start at the smaller depth; or, if asked
to, at the target's, with a hole in the draft's KV where its pool has less. Invariant: pages for copy-on-write are
allocated before anything is pinned; whatever is evicted meanwhile, the pools end at depths that go together, perhaps
at 0. Called by `PairedCache`."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core.frontier import Frontier
from cluster.core.handle import DRAFT, TARGET, CacheHandle, Claim, Coupling
from cluster.core.holding import BlockCopy, Holding

RECLAIMS = 2
"""How often a claim is tried again at a smaller depth, before it settles for nothing."""


def frontier_of(handle: CacheHandle) -> Frontier:
    """What can be reused now."""
    most = _most(handle)
    return _frontier(handle, [holding.depth(most) for holding in handle.holdings.values()], _joint(handle, most))


def claim_pools(handle: CacheHandle, coupling: Coupling, skip_gap: bool) -> Claim:
    """Takes what is published and sets the cursors of all holdings, which are empty."""
    holdings = list(handle.holdings.values())
    wanted = _depths(handle, coupling, [_most(handle)] * len(holdings), skip_gap)
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
    if skip_gap and coupling is Coupling.JOINT and DRAFT in handle.holdings:
        handle.holdings[DRAFT].skip_to(handle.cursor(TARGET))
    joint = min(holding.cursor for holding in holdings)
    return Claim(_frontier(handle, [holding.found for holding in holdings], joint), copies)


def _frontier(handle: CacheHandle, depths: Sequence[int], joint: int) -> Frontier:
    found = {name: min(depth, _most(handle)) for name, depth in zip(handle.holdings, depths, strict=True)}
    return Frontier(found[TARGET], found.get(DRAFT), joint)


def _take(holdings: Sequence[Holding], depths: Sequence[int]) -> tuple[BlockCopy, ...]:
    for holding, depth in zip(holdings, depths, strict=True):
        holding.prepare(depth)
    # The target last: it is the one whose depth the others bound.
    taken = [holding.take(depth) for holding, depth in zip(reversed(holdings), reversed(depths), strict=True)]
    return tuple(copy for copy in taken if copy is not None)


def _depths(handle: CacheHandle, coupling: Coupling, most: Sequence[int], skip_gap: bool) -> list[int]:
    """How many units each pool is to take, so many at most."""
    if coupling is Coupling.INDEPENDENT:
        return [holding.depth(limit) for holding, limit in zip(handle.holdings.values(), most, strict=True)]
    joint = _joint(handle, min(most))
    if skip_gap and DRAFT in handle.holdings:
        return _across_gap(handle, most, joint) or [joint] * len(most)
    return [joint] * len(most)


def _joint(handle: CacheHandle, most: int, but: str | None = None) -> int:
    """The deepest place, `most` at most, from which all pools can go on (but one, if it is named)."""
    while True:
        depth = min(each.depth(most) for name, each in handle.holdings.items() if name != but)
        if depth == most:
            return most
        most = depth


def _across_gap(handle: CacheHandle, most: Sequence[int], joint: int) -> list[int] | None:
    """Depths that leave a hole of whole blocks in the draft's KV; None if the others can't go on beyond `joint`."""
    limits, draft = dict(zip(handle.holdings, most, strict=True)), handle.holdings[DRAFT]
    own, size = limits.pop(DRAFT), draft.block_size
    start = min(draft.stream.n_units, *limits.values())
    while start % size or start != _joint(handle, start, but=DRAFT):
        start = _joint(handle, start // size * size, but=DRAFT)
    if start <= joint:
        return None
    own = draft.depth(min(own, start)) // size * size
    held = own if draft.depth(own) == own else 0
    return [held if name == DRAFT else start for name in handle.holdings]


def _most(handle: CacheHandle) -> int:
    """Known tokens that may be reused: all but the last one, whose logits are needed."""
    return max(0, handle.tokens.n_tokens - 1)
