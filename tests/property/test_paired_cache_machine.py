"""Random lives of requests on paired pools, checked against the token oracle after every step.

Prompts come from a small alphabet and from each other, so that they fork everywhere, block ends included. Pools range
from too small to roomy, allocations fail at random, requests are cancelled, suspended and resumed at any point."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.eviction import DecayingPriority, LeastRecentlyUsed
from cluster.core.handle import HandleStatus
from cluster.core.paired_cache import Coupling, PairedCache, PoolSpec
from tests.property.budget import steps
from tests.unit.core.oracle import OracleTensors, Sequencer

SALTS = (b"", b"a")
MAX_REQUESTS = 5


class PairedCacheMachine(RuleBasedStateMachine):
    @initialize(
        sizes=st.tuples(*[st.integers(1, 8)] * 3),
        spans=st.tuples(st.integers(0, 4), st.integers(0, 4)),
        blocks=st.tuples(*[st.integers(2, 40)] * 3),
        coupling=st.sampled_from((Coupling.JOINT, Coupling.JOINT, Coupling.INDEPENDENT)),
        third=st.booleans(),
        windows=st.tuples(*[st.sampled_from((None, None, 2, 3, 5, 8, 13))] * 3),
        lru=st.booleans(),
        seed=st.integers(0, 2**32),
    )
    def build(
        self,
        sizes: tuple[int, int, int],
        spans: tuple[int, int],
        blocks: tuple[int, int, int],
        coupling: Coupling,
        third: bool,
        windows: tuple[int | None, int | None, int | None],
        lru: bool,
        seed: int,
    ) -> None:
        self.cache = PairedCache(
            PoolSpec("target", sizes[0], blocks[0], window=windows[0]),
            PoolSpec("draft", sizes[1], blocks[1], spans[0], window=windows[1]),
            coupling,
            extra=[PoolSpec("third", sizes[2], blocks[2], spans[1], window=windows[2])] if third else [],
            policy=LeastRecentlyUsed if lru else lambda: DecayingPriority(half_life=3),
        )
        self.oracle = OracleTensors(self.cache)
        self.rng = random.Random(seed)
        self.live: list[Sequencer] = []
        self.history: list[list[int]] = [[0]]
        self.fail_next = 0
        self.told: dict[bytes, tuple[bool, bool]] = {}
        for pool in self.cache.pools.values():
            pool.allocate = self._flaky(pool.allocate)  # type: ignore[method-assign]

    def _flaky(self, allocate: Any) -> Any:
        def allocate_or_fail(count: int) -> list[int] | None:
            if self.fail_next:
                self.fail_next -= 1
                if not self.fail_next:
                    return None
            return allocate(count)

        return allocate_or_fail

    # ------------------------------------------------------------ rules

    @precondition(lambda self: len(self.live) < MAX_REQUESTS)
    @rule(
        source=st.integers(0, 10**6),
        keep=st.integers(0, 40),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=20),
        salt=st.sampled_from(SALTS),
        use_draft=st.sampled_from((True, True, True, False)),
        reuse=st.sampled_from((True, True, True, False)),
        weight=st.sampled_from((0.5, 1.0, 4.0)),
        skip=st.booleans(),
    )
    def arrive(
        self,
        source: int,
        keep: int,
        more: list[int],
        salt: bytes,
        use_draft: bool,
        reuse: bool,
        weight: float,
        skip: bool,
    ) -> None:
        prompt = [*self.history[source % len(self.history)][:keep], *more]
        self.history = [*self.history[-20:], prompt]
        name = f"r{len(self.history)}"
        handle = self.cache.open(name, prompt, tenant_salt=salt, use_draft=use_draft, reuse=reuse, weight=weight)
        self.live.append(Sequencer(self.oracle, handle, self.rng))
        self._claim(self.live[-1], skip)

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), fail=st.integers(0, 3), skip=st.booleans())
    def suspend_and_resume(self, which: int, fail: int, skip: bool) -> None:
        request = self.live[which % len(self.live)]
        self.cache.suspend(request.handle)
        assert all(meters.reserved == 0 for meters in self.cache.meters().values())
        self.fail_next = fail
        self._claim(request, skip)

    def _claim(self, request: Sequencer, skip: bool) -> None:
        handle = request.handle
        probed = self.cache.probe(handle)
        for pool in handle.pools:
            holding = handle.holdings[pool]
            depth, best = holding.depth(10**6), self.oracle.best_depth(handle, pool) if holding.reuse else 0
            assert depth == best or (holding.pool.spec.window is not None and depth < best)
        request.claim(skip)
        self.fail_next = 0
        if self.cache.coupling is Coupling.JOINT:
            assert len({handle.cursor(pool) for pool in handle.pools}) == 1
            holes = [holding.hole for holding in handle.holdings.values() if holding.hole is not None]
            assert handle.cursor("target") <= (probed.target if skip else probed.joint)
            assert not holes or (skip and holes == [handle.holdings["draft"].hole])

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 20), fail=st.integers(0, 3))
    def prefill(self, which: int, chunk: int, fail: int) -> None:
        request = self.live[which % len(self.live)]
        self._grow(request, fail, lambda: request.prefill(chunk))

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), drafts=st.integers(0, 4), accepted=st.integers(0, 4), fail=st.integers(0, 3))
    def decode(self, which: int, drafts: int, accepted: int, fail: int) -> None:
        request = self.live[which % len(self.live)]
        if request.handle.cursor("target") >= len(request.tokens) - 1:
            self._grow(
                request, fail, lambda: request.decode(drafts, min(drafts, accepted), scratch=self.rng.randrange(4))
            )

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 40), steps=st.integers(0, 12))
    def run_on(self, which: int, chunk: int, steps: int) -> None:
        """Many steps at once, as far as the pools allow: so that windows slide, and equal prompts are served whole."""
        request = self.live[which % len(self.live)]
        handle = request.handle
        while handle.cursor("target") < len(request.tokens) - 1 and request.prefill(chunk):
            self.oracle.check_handle(handle)
        for _ in range(steps if handle.cursor("target") >= len(request.tokens) - 1 else 0):
            request.decode(2, self.rng.randrange(3))
            self.oracle.check_handle(handle)

    def _grow(self, request: Sequencer, fail: int, step: Any) -> None:
        before = self.cache.meters(), [list(each.table) for each in request.handle.holdings.values()]
        self.fail_next = fail
        grew = step()
        self.fail_next = 0
        if not grew:
            after = self.cache.meters()
            assert [list(each.table) for each in request.handle.holdings.values()] == before[1]
            for name, meters in before[0].items():
                assert (after[name].in_use, after[name].reserved) == (meters.in_use, meters.reserved)

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), wide=st.integers(0, 9), narrow=st.integers(0, 9), twice=st.booleans())
    def skip_a_step(self, which: int, wide: int, narrow: int, twice: bool) -> None:
        handle = self.live[which % len(self.live)].handle
        before = {pool: list(handle.block_table(pool)) for pool in handle.pools}
        extra = [narrow] * sum(pool not in ("target", "draft") for pool in handle.pools)
        reservation = self.cache.reserve(handle, wide, narrow, extra)
        if reservation is not None:
            self.cache.revert(reservation)
            if twice:
                self.cache.revert(reservation)
        assert {pool: list(handle.block_table(pool)) for pool in handle.pools} == before

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), pool=st.integers(0, 2), beyond=st.integers(1, 5))
    def commit_what_no_known_token_determines(self, which: int, pool: int, beyond: int) -> None:
        request = self.live[which % len(self.live)]
        handle = request.handle
        holding = list(handle.holdings.values())[pool % len(handle.holdings)]
        width = max(0, holding.stream.n_units - holding.cursor) + beyond
        amounts = request.roles([width if each is holding else 0 for each in handle.holdings.values()])
        before = self.cache.meters(), list(holding.table), holding.cursor
        reservation = self.cache.reserve(handle, *amounts)
        if reservation is None:
            return
        refused = False
        try:
            self.cache.commit(handle, *amounts)
        except ValueError:
            refused = True
        assert refused
        self.cache.revert(reservation)
        assert (list(holding.table), holding.cursor) == before[1:]
        assert all(meters.in_use == before[0][name].in_use for name, meters in self.cache.meters().items())

    @precondition(lambda self: bool(self.live))
    @rule(which=st.integers(0, 99), tail=st.booleans())
    def end(self, which: int, tail: bool) -> None:
        request = self.live.pop(which % len(self.live))
        self.history.append(request.tokens)
        self.cache.free(request.handle, publish_tail=tail)
        self.cache.free(request.handle)
        assert request.handle.status is HandleStatus.CLOSED

    @rule(count=st.integers(1, 20), pool=st.sampled_from(("target", "draft")))
    def evict(self, count: int, pool: str) -> None:
        self.cache.pools[pool].tree.evict(count)

    @rule(snapshot=st.booleans())
    def report(self, snapshot: bool) -> None:
        changes = self.cache.snapshot() if snapshot else self.cache.changes()
        if changes.complete:
            self.told.clear()
        for key in changes.removed:
            self.told.pop(key, None)
        for state in changes.stored:
            assert state.parent is None or state.parent in self.told or not state.depth
            self.told[state.key] = state.target, state.draft
        complete = self.cache.snapshot().stored
        assert self.told == {state.key: (state.target, state.draft) for state in complete}

    # ------------------------------------------------------------ what holds at any time

    @invariant()
    def invariants_hold(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check()

    @invariant()
    def every_cell_that_may_be_read_is_right(self) -> None:
        if hasattr(self, "cache"):
            for request in self.live:
                self.oracle.check_handle(request.handle)
            self.oracle.check_published(SALTS)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            for request in self.live:
                self.cache.free(request.handle)
            self.cache.check()
            assert all(meters.in_use == 0 for meters in self.cache.meters().values())


TestPairedCache = PairedCacheMachine.TestCase
TestPairedCache.settings = settings(steps(20_000), stateful_step_count=50)
