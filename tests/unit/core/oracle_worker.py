"""A worker without a model: carries out the plans of an `Admission` on oracle tensors.

The "model" continues a text by a fixed function of all its tokens, its drafter guesses right at random. Everything
else is what the engine does: copies, target rows with drafts, draft slots with real inputs, scratch slots,
verification, completion."""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.core.admission import Admission
from cluster.core.batch_plan import AdmissionLimits, DraftShape, RowPlan, StepPlan
from cluster.core.draft_gap import GapPolicy
from cluster.core.draft_length import DraftLength
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.handle import Coupling
from cluster.core.request import FinishReason, Request, RequestStatus
from cluster.core.sampling import SamplingParams
from tests.support.walking import walked
from tests.unit.core.oracle import OracleTensors

VOCABULARY = 3


def continuation(tokens: Sequence[int]) -> int:
    """The model: the token that follows these."""
    return hash(tuple(tokens)) % VOCABULARY


def reference(prompt: Sequence[int], count: int) -> list[int]:
    """What a request must get, however it is scheduled."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(continuation(tokens))
    return tokens[len(prompt) :]


def make_request(name: str, prompt: Sequence[int], max_tokens: int, **options: object) -> Request:
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens), **options)  # type: ignore[arg-type]


class OracleWorker:
    """`guess` is the probability that a drafted token is right. `trees`: whether drafts are trees of random shape."""

    def __init__(
        self,
        oracle: OracleTensors,
        limits: AdmissionLimits,
        shape: DraftShape,
        rng: random.Random,
        guess: float = 0.6,
        lengths: DraftLength | None = None,
        gaps: GapPolicy | None = None,
        trees: bool = False,
    ) -> None:
        self.oracle = oracle
        self.trees = trees
        self.admission = Admission(oracle.cache, limits, shape, lengths, gaps)
        self.rng = rng
        self.guess = guess
        self.plans: list[StepPlan] = []
        self.kept_states: dict[str, int] = {}
        """From which position on a drafter that reads the target's states has them: a request's last draft slot."""

    def step(self, now: float = 0.0) -> StepPlan:
        """Plans one step and runs all of it."""
        plan = self.admission.plan(now)
        self.plans.append(plan)
        self.run(plan)
        return plan

    def run(self, plan: StepPlan) -> None:
        self.oracle.copy(plan.copies)
        for row in plan.rows:
            if row.request.status is RequestStatus.RUNNING:
                self._forward(row)
        for row in plan.rows:
            if row.request.status is RequestStatus.RUNNING:
                self._verify_and_draft(row)

    def drain(self, most: int) -> int:
        """Steps until nothing is left to do; fails after `most`."""
        for count in range(most):
            if not self.admission.has_work():
                return count
            plan = self.step()
            assert plan.rows, "there is work, but nothing runs"
        raise AssertionError(f"not done after {most} steps")

    def _forward(self, row: RowPlan) -> None:
        request, handle = row.request, row.request.handle
        assert handle is not None
        self.oracle.check_handle(handle)
        known = [*request.prompt, *request.output]
        assert row.start <= handle.cursor("target") or row.start == 0
        assert list(row.tokens) == known[row.start : row.start + row.num_known] + list(row.tokens[row.num_known :])
        self.oracle.write(handle, "target", row.start, row.start + row.num_known, known)
        for slot, path in enumerate(_paths(row.drafts), row.known):
            self.oracle.put(handle, "target", slot, (*known, *path))

    def _verify_and_draft(self, row: RowPlan) -> None:
        request, handle = row.request, row.request.handle
        assert handle is not None
        known = [*request.prompt, *request.output]
        new, path = self._verify(known, row.drafts) if row.needs_logits else ([], [])
        for slot, node in enumerate(path, row.known):  # a node never comes before its place on the path
            self.oracle.move(handle, "target", row.known + node, slot)
        tokens = known + new
        wanted = row.drafts_after(len(new))
        computed = 0
        if row.draft_start is not None:
            end = row.draft_end(len(new))
            computed = end - row.draft_start
            shape = self.admission.shape
            assert not computed or end <= shape.real_slots(len(tokens))
            assert not wanted or end == shape.real_slots(len(tokens))
            if shape.coupling is Coupling.JOINT:
                kept = row.start if row.claim is not None else self.kept_states[request.request_id]
                computed_to = row.start + row.num_known + len(path)
                assert kept <= row.draft_start and end <= computed_to, "hidden states that weren't computed"
                self.kept_states[request.request_id] = end
            self.oracle.write(handle, "draft", row.draft_start, end, tokens)
            self.oracle.write(handle, "draft", end, end + shape.scratch_for(wanted), ())
        self.admission.complete(row, new, computed, self._draft(tokens, wanted))
        if len(request.output) >= request.sampling.max_tokens:
            self.admission.finish(request, FinishReason.LENGTH)

    @staticmethod
    def _verify(known: list[int], drafts: Drafts) -> tuple[list[int], list[int]]:
        walk = walked(drafts, [continuation([*known, *path]) for path in ((), *_paths(drafts))])
        return walk.tokens, walk.path

    def _draft(self, tokens: list[int], depth: int) -> Drafts:
        """A chain, or a tree with up to twice as many nodes, so deep at most."""
        drafts = NO_DRAFTS
        for node in range(2 * depth if self.trees else depth):
            parent = self.rng.choice([None, *range(node)]) if self.trees else (node - 1 if node else None)
            path = [drafts.tokens[each] for each in drafts.path(parent)]
            right = self.rng.random() < self.guess
            token = continuation(tokens + path) if right else self.rng.randrange(VOCABULARY)
            drafts = Drafts((*drafts.tokens, token), (*drafts.parents, parent))
        return drafts.within(depth)


def _paths(drafts: Drafts) -> list[tuple[int, ...]]:
    """The tokens from the last known one to each node."""
    return [tuple(drafts.tokens[each] for each in drafts.path(node)) for node in range(len(drafts))]
