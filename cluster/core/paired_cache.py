"""The pools of a worker as one transaction: the pair of target and draft, and any further pool that joins.

A request opens a handle, claims what is published of its tokens, and then repeats reserve -> (forward) -> commit. Every
operation does its work in all pools or in none, so the pools of a request can't drift apart.

    open ──► claim ──► reserve ──► commit ──┐         suspend: give all back, claim again later
                         ▲   └──► revert    │         free: publish the tail, give all back, for good
                         └──────────────────┘

Invariants (I1..I6 of the design; `check` verifies them): no block is lost or held twice; a cursor is never ahead of
computed KV, nor of what known tokens determine; all holdings of a handle have one status, the handle's. Called by
`Admission` and the engine, from one thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cluster.core.block_pool import BlockPool, PoolMeters, PoolSpec, split_budget
from cluster.core.claiming import claim_pools, frontier_of
from cluster.core.eviction import EvictionPolicy, LeastRecentlyUsed
from cluster.core.frontier import Frontier
from cluster.core.handle import DRAFT, TARGET, CacheHandle, Claim, Coupling, HandleStatus, Reservation
from cluster.core.holding import BlockCopy, Holding
from cluster.core.invariants import check_pools
from cluster.core.keys import Contents, KeyStream, ReuseScope, TokenBuffer
from cluster.core.ledger import FrontierChanges, FrontierLedger
from cluster.core.prefix_tree import PrefixTree
from cluster.core.runs import Run

__all__ = [
    "DRAFT",
    "TARGET",
    "BlockCopy",
    "CacheHandle",
    "Claim",
    "Coupling",
    "HandleStatus",
    "PairedCache",
    "PoolMeters",
    "PoolSpec",
    "Reservation",
    "split_budget",
]


class PairedCache:
    """`extra` pools join every transaction. A pool's KV belongs to its spec's model and dtype; a draft's also to the
    target's, from which it is computed. `policy` makes the eviction order of each pool. Without `reports` no block is
    ever hashed, and `changes` is always empty."""

    def __init__(
        self,
        target: PoolSpec,
        draft: PoolSpec | None = None,
        coupling: Coupling = Coupling.NONE,
        *,
        extra: Sequence[PoolSpec] = (),
        policy: Callable[[], EvictionPolicy[Run]] = LeastRecentlyUsed,
        reports: bool = True,
    ) -> None:
        """Raises ValueError for pools that can't be paired."""
        specs = [target, *([draft] if draft is not None else []), *extra]
        _check_specs(specs, draft, coupling)
        self.coupling = coupling
        self._reports = reports
        self._ledger = FrontierLedger(limit=4 * sum(spec.num_blocks for spec in specs))
        listeners = {TARGET: self._ledger.target, DRAFT: self._ledger.draft}
        self.pools: dict[str, BlockPool] = {
            spec.name: BlockPool(spec, target.block_size, policy(), listeners.get(spec.name)) for spec in specs
        }
        self._handles: dict[int, CacheHandle] = {}

    def scope(
        self, pool: str, *, tenant_salt: bytes = b"", lora: str | None = None, contents: Contents = ()
    ) -> ReuseScope:
        """Within which blocks of the pool are shared. The target's is the one that raw block keys are made with."""
        spec, target = self.pools[pool].spec, self.pools[TARGET].spec
        model = spec.model if pool == TARGET else repr((target.model, spec.model))
        return ReuseScope(model, pool, spec.span, spec.kv_dtype, spec.block_size, lora, tenant_salt, contents)

    # ------------------------------------------------------------ opening and claiming

    def open(
        self,
        request_id: str,
        tokens: Iterable[int],
        *,
        tenant_salt: bytes = b"",
        lora: str | None = None,
        contents: Contents = (),
        use_draft: bool = True,
        reuse: bool = True,
        weight: float = 1.0,
    ) -> CacheHandle:
        """A handle that holds nothing yet. Without `use_draft` it never takes anything from the draft pool or hashes
        its keys; without `reuse` it neither claims nor publishes. `weight` is for eviction by priority."""
        buffer = TokenBuffer(tokens)
        names = [name for name in self.pools if use_draft or name != DRAFT]
        scopes = {name: self.scope(name, tenant_salt=tenant_salt, lora=lora, contents=contents) for name in names}
        streams = {name: KeyStream(scopes[name], buffer) for name in names}
        raw = streams[TARGET] if self._reports else None
        holdings = {
            name: Holding(self.pools[name], streams[name], raw if name in (TARGET, DRAFT) else None, reuse, weight)
            for name in names
        }
        handle = CacheHandle(request_id, buffer, holdings)
        self._handles[id(handle)] = handle
        return handle

    def probe(self, handle: CacheHandle) -> Frontier:
        """What a claim would find now. Changes nothing."""
        return frontier_of(handle)

    def claim(self, handle: CacheHandle, skip_gap: bool = False) -> Claim:
        """Takes what is published of the handle's tokens and sets the cursors behind it, perhaps at 0.

        The last known token is never covered: its logits are needed. With `skip_gap`, a draft that starts where the
        target does may hold less than it: then there is a hole in its KV, and nothing after it will be published."""
        if handle.status is not HandleStatus.IDLE:
            raise ValueError(f"request {handle.request_id} is {handle.status}; only an idle handle can claim")
        claim = claim_pools(handle, self.coupling, skip_gap)
        handle.status = HandleStatus.CLAIMED
        return claim

    # ------------------------------------------------------------ growing

    def append(self, handle: CacheHandle, tokens: Iterable[int]) -> None:
        """Adds tokens that are now known (sampled, or drafted and accepted)."""
        handle.tokens.extend(tokens)

    def reserve(
        self, handle: CacheHandle, target_tokens: int, draft_tokens: int = 0, extra_tokens: Sequence[int] = ()
    ) -> Reservation | None:
        """Makes room for so many positions beyond each pool's cursor; None, and nothing happens, if any pool lacks it.

        `extra_tokens` are for the extra pools, in their order.
        """
        if handle.status is not HandleStatus.CLAIMED or handle.reservation is not None:
            raise ValueError(
                f"request {handle.request_id} must be claimed, and its last reservation closed, to reserve"
            )
        holdings = handle.holdings.values()
        taken = tuple(map(Holding.missing, holdings, self._widths(handle, target_tokens, draft_tokens, extra_tokens)))
        if any(taken) and not self._grow(list(holdings), taken):
            return None
        handle.reservation = Reservation(handle, taken)
        return handle.reservation

    @staticmethod
    def _grow(holdings: Sequence[Holding], taken: Sequence[int]) -> bool:
        """Adds so many blocks to each; to none, and False, if any pool lacks them."""
        if any(blocks > holding.pool.available for holding, blocks in zip(holdings, taken, strict=True)):
            return False
        for done, (holding, blocks) in enumerate(zip(holdings, taken, strict=True)):
            if not holding.grow(blocks):
                for grown, given in zip(holdings[:done], taken, strict=False):
                    grown.shrink(given)
                return False
        for holding, blocks in zip(holdings, taken, strict=True):
            holding.pool.reserved += blocks
        return True

    def commit(
        self, handle: CacheHandle, target_computed: int, draft_computed: int = 0, extra_computed: Sequence[int] = ()
    ) -> None:
        """The forward ran: so many positions beyond each cursor have valid KV, whose tokens are known (`append` first).

        Advances the cursors, publishes what is complete, and gives back reserved blocks that nothing committed lies in.
        Raises ValueError, and changes nothing, if more was computed than reserved, or than known tokens determine.
        """
        steps = list(
            zip(
                handle.holdings.values(),
                self._widths(handle, target_computed, draft_computed, extra_computed),
                strict=True,
            )
        )
        for holding, computed in steps:
            holding.check_advance(computed)
        self._close(handle)
        for holding, computed in steps:
            holding.advance(computed)

    def revert(self, reservation: Reservation) -> None:
        """The step was not run: gives back exactly what was reserved. A second time, or after a commit, does
        nothing."""
        if not reservation.open:
            return
        self._close(reservation.handle)
        for holding, blocks in zip(reservation.handle.holdings.values(), reservation.taken, strict=True):
            holding.shrink(blocks)

    def _close(self, handle: CacheHandle) -> None:
        reservation, handle.reservation = handle.reservation, None
        if reservation is not None:
            reservation.open = False
            if any(reservation.taken):
                for holding, blocks in zip(handle.holdings.values(), reservation.taken, strict=True):
                    holding.pool.reserved -= blocks

    @staticmethod
    def _widths(handle: CacheHandle, target: int, draft: int, extra: Sequence[int]) -> tuple[int, ...]:
        widths = (target, draft, *extra) if DRAFT in handle.holdings else (target, *extra)
        if len(widths) != len(handle.holdings):
            raise ValueError(f"amounts for {len(widths)} pools given, but request {handle.request_id} uses others")
        return widths

    # ------------------------------------------------------------ letting go

    def suspend(self, handle: CacheHandle) -> None:
        """Gives everything back, in all pools; published blocks stay cached. The handle can claim again."""
        if handle.status is HandleStatus.CLAIMED:
            self._close(handle)
            for holding in handle.holdings.values():
                holding.release()
            handle.status = HandleStatus.IDLE

    def free(self, handle: CacheHandle, publish_tail: bool = True) -> None:
        """Ends the handle: publishes its partial last blocks if asked, and gives everything back. Idempotent."""
        if publish_tail and handle.status is HandleStatus.CLAIMED:
            for holding in handle.holdings.values():
                holding.publish_tail()
        self.suspend(handle)
        handle.status = HandleStatus.CLOSED
        self._handles.pop(id(handle), None)

    # ------------------------------------------------------------ looking from outside

    def meters(self) -> dict[str, PoolMeters]:
        """Blocks by state, for each pool."""
        return {name: pool.meters() for name, pool in self.pools.items()}

    def changes(self) -> FrontierChanges:
        """What was published and evicted since the last call, by raw block key."""
        return self._ledger.changes(self._reported_trees())

    def snapshot(self) -> FrontierChanges:
        """All that is published, by raw block key."""
        return self._ledger.everything(self._reported_trees())

    def _reported_trees(self) -> list[PrefixTree]:
        return [pool.tree for name, pool in self.pools.items() if name in (TARGET, DRAFT)]

    def check(self) -> None:
        """Raises RuntimeError if an invariant is broken. For tests and audits: the cost is that of looking at all."""
        check_pools(self.pools, tuple(self._handles.values()))


def _check_specs(specs: Sequence[PoolSpec], draft: PoolSpec | None, coupling: Coupling) -> None:
    names = [spec.name for spec in specs]
    if names[0] != TARGET or (draft is not None and draft.name != DRAFT) or len(set(names)) < len(names):
        raise ValueError(f"pools are named {names}, but must be named 'target', then 'draft', then apart from these")
    if specs[0].span:
        raise ValueError(f"span of the target pool is {specs[0].span}, but must be 0: its KV depends on no later token")
    if (draft is None) != (coupling is Coupling.NONE):
        raise ValueError(f"coupling is {coupling}, but must be none exactly if there is no draft pool")
