"""Random traffic through admission: whatever the pools, priorities, cancels and failures, every request ends with its
own tokens."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.draft_costs import FixedCosts
from cluster.core.draft_gap import FixedGaps, PredictedGaps
from cluster.core.draft_length import AdaptiveDraftLength
from cluster.core.handle import Coupling
from cluster.core.paired_cache import PairedCache, PoolSpec
from cluster.core.request import FinishReason, Request, RequestStatus
from cluster.errors import CapacityExceeded, PromptTooLarge
from tests.property.budget import steps
from tests.unit.core.oracle import OracleTensors
from tests.unit.core.oracle_worker import OracleWorker, make_request, reference

MODES = (
    (Coupling.NONE, None),
    (Coupling.INDEPENDENT, 0),
    (Coupling.JOINT, 0),
    (Coupling.JOINT, 1),
    (Coupling.JOINT, 2),
    (Coupling.JOINT, 4),
)


class AdmissionMachine(RuleBasedStateMachine):
    @initialize(
        mode=st.sampled_from(MODES),
        sizes=st.tuples(st.integers(1, 8), st.integers(1, 8)),
        blocks=st.tuples(st.integers(3, 40), st.integers(3, 40)),
        batch=st.integers(1, 4),
        budget=st.integers(5, 40),
        chunk=st.sampled_from((None, 1, 3, 8)),
        drafts=st.integers(0, 4),
        positions=st.sampled_from((None, 12)),
        adaptive=st.booleans(),
        windows=st.tuples(*[st.sampled_from((None, None, 1, 3, 7))] * 2),
        trees=st.booleans(),
        gaps=st.sampled_from((None, FixedGaps(skip=True), "predicted")),
        seed=st.integers(0, 2**32),
    )
    def build(
        self,
        mode: tuple[Coupling, int | None],
        sizes: tuple[int, int],
        blocks: tuple[int, int],
        batch: int,
        budget: int,
        chunk: int | None,
        drafts: int,
        positions: int | None,
        adaptive: bool,
        windows: tuple[int | None, int | None],
        trees: bool,
        gaps: FixedGaps | str | None,
        seed: int,
    ) -> None:
        coupling, span = mode
        draft = (
            None if coupling is Coupling.NONE else PoolSpec("draft", sizes[1], blocks[1], span or 0, window=windows[1])
        )
        self.cache = PairedCache(PoolSpec("target", sizes[0], blocks[0], window=windows[0]), draft, coupling)
        limits = AdmissionLimits(batch, budget, chunk, max_queue=6, max_len=200, aging=10)
        self.worker = OracleWorker(
            OracleTensors(self.cache),
            limits,
            DraftShape(coupling, span, drafts, positions, scratch=3 * drafts if trees else None),
            random.Random(seed),
            lengths=AdaptiveDraftLength(FixedCosts(0.3, 0.1), retry=2) if adaptive else None,
            gaps=PredictedGaps(FixedCosts()) if isinstance(gaps, str) else gaps,
            trees=trees,
        )
        self.admission = self.worker.admission
        self.requests: list[Request] = []
        self.now = 0.0
        self.fail_next = 0
        for pool in self.cache.pools.values():
            pool.allocate = self._flaky(pool.allocate)  # type: ignore[method-assign]

    def _flaky(self, allocate):  # type: ignore[no-untyped-def]
        def allocate_or_fail(count: int) -> list[int] | None:
            if self.fail_next:
                self.fail_next -= 1
                if not self.fail_next:
                    return None
            return allocate(count)

        return allocate_or_fail

    @rule(
        keep=st.integers(0, 30),
        more=st.lists(st.integers(0, 2), min_size=1, max_size=15),
        count=st.integers(1, 12),
        priority=st.integers(0, 3),
        patience=st.sampled_from((None, None, 5.0)),
        speculate=st.sampled_from((True, True, False)),
        reuse=st.sampled_from((True, True, False)),
    )
    def submit(
        self,
        keep: int,
        more: list[int],
        count: int,
        priority: int,
        patience: float | None,
        speculate: bool,
        reuse: bool,
    ) -> None:
        earlier = self.worker.rng.choice(self.requests) if self.requests else None
        prompt = [*([*earlier.prompt, *earlier.output][:keep] if earlier else []), *more]
        deadline = None if patience is None else self.now + patience
        name = f"r{len(self.requests)}"
        request = make_request(
            name, prompt, count, priority=priority, deadline=deadline, speculate=speculate, reuse=reuse
        )
        before = self.cache.meters()
        try:
            self.admission.submit(request)
        except PromptTooLarge as refusal:
            spec = self.cache.pools["target"].spec
            assert refusal.needed_blocks > spec.num_blocks == refusal.available_blocks
            assert spec.blocks_for(refusal.largest_prompt + count - 1) <= spec.num_blocks or not refusal.largest_prompt
        except CapacityExceeded:
            assert self.admission.num_waiting >= 6
        else:
            self.requests.append(request)
        assert self.cache.meters() == before

    @rule(fail=st.sampled_from((0, 0, 0, 1, 2, 3)))
    def step(self, fail: int) -> None:
        self.now += 1
        self.fail_next = fail
        had_work = self.admission.has_work()
        plan = self.admission.plan(self.now)
        injected = fail > 0 and self.fail_next == 0
        self.fail_next = 0
        assert plan.rows or plan.expired or not had_work or injected, "there is work, but nothing runs"
        limits = self.admission.limits
        assert plan.num_tokens <= limits.token_budget and len(plan.rows) <= limits.max_batch
        self.worker.run(plan)

    @rule(twice=st.booleans())
    def skip_a_step(self, twice: bool) -> None:
        plan = self.admission.plan(self.now)
        self.admission.revert(plan)
        if twice:
            self.admission.revert(plan)
        assert all(meters.reserved == 0 for meters in self.cache.meters().values())

    @rule(count=st.integers(1, 20), pool=st.sampled_from(("target", "draft")))
    def evict(self, count: int, pool: str) -> None:
        if pool in self.cache.pools:
            self.cache.pools[pool].tree.evict(count)

    @precondition(lambda self: bool(self.requests))
    @rule(which=st.integers(0, 99), in_step=st.booleans())
    def cancel(self, which: int, in_step: bool) -> None:
        request = self.requests[which % len(self.requests)]
        plan = self.admission.plan(self.now) if in_step else None
        was_alive = request.status is not RequestStatus.FINISHED
        assert (self.admission.cancel(request.request_id) is request) == was_alive
        assert self.admission.cancel(request.request_id) is None
        if plan is not None:
            self.worker.run(plan)

    @precondition(lambda self: bool(self.requests))
    @rule(which=st.integers(0, 99))
    def fail_one(self, which: int) -> None:
        self.admission.finish(self.requests[which % len(self.requests)], FinishReason.ERROR)

    @invariant()
    def invariants_hold(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        self.worker.oracle.check_published()
        for request in self.requests:
            assert request.handle is not None
            if request.status is not RequestStatus.RUNNING:
                assert not any(request.handle.block_table(pool) for pool in request.handle.pools)
            right = reference(request.prompt, request.sampling.max_tokens)
            assert request.output == right[: len(request.output)]

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        work = sum(len(each.prompt) + 2 * each.sampling.max_tokens for each in self.requests)
        self.worker.drain(most=50 + 4 * work)
        assert all(meters.in_use == 0 for meters in self.cache.meters().values())
        for request in self.requests:
            if request.finish is FinishReason.LENGTH:
                assert request.output == reference(request.prompt, request.sampling.max_tokens)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(steps(20_000), stateful_step_count=50)
