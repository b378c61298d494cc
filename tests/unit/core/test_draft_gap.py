"""Whether to leave a gap in the draft's KV: the predicted times decide, and acceptance is learnt."""

import random

import pytest

from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.draft_costs import FixedCosts
from cluster.core.draft_gap import FixedGaps, PredictedGaps
from cluster.core.handle import Coupling
from tests.unit.core.oracle import make_pair, serve
from tests.unit.core.oracle_worker import OracleWorker, make_request, reference


def policy(whole: int, hole: int, steps: int = 400, per_token: float = 0.01) -> PredictedGaps:
    """After so many steps with `whole` and `hole` accepted drafts each."""
    gaps = PredictedGaps(FixedCosts(token=per_token))
    for _ in range(steps):
        gaps.observe(False, whole)
        gaps.observe(True, hole)
    return gaps


def test_the_choice_with_the_smaller_predicted_time_is_taken() -> None:
    gaps = policy(whole=3, hole=1)
    # 100 tokens: 25 steps, or 50 behind a hole; the gap costs a hundredth of a step for each of its tokens.
    assert not gaps.skips(2400, 100)
    assert gaps.skips(2600, 100)


def test_a_hole_that_costs_no_acceptance_is_left() -> None:
    assert policy(whole=2, hole=2).skips(100, 1000)


def test_before_a_hole_was_seen_it_counts_as_half_as_good() -> None:
    gaps = PredictedGaps(FixedCosts(token=0.01))
    for _ in range(400):
        gaps.observe(False, 2)
    # 60 tokens: 20 steps, or 30.
    assert gaps.skips(1010, 60) and not gaps.skips(990, 60)


def test_what_holes_really_cost_replaces_the_assumption() -> None:
    gaps = policy(whole=2, hole=0)
    assert not gaps.skips(1010, 60), "20 steps against almost 60"


@pytest.mark.parametrize("span", [0, 1, 2])
@pytest.mark.parametrize("skip", [False, True])
def test_requests_follow_the_policy_and_get_their_own_tokens(span: int, skip: bool) -> None:
    oracle = make_pair(span)
    prompt = list(range(100, 126))
    serve(oracle, prompt)
    oracle.cache.pools["draft"].tree.evict(4)
    worker = OracleWorker(
        oracle,
        AdmissionLimits(max_batch=4, token_budget=64, chunk=5, max_queue=8, max_len=100),
        DraftShape(Coupling.JOINT, span, 3),
        random.Random(0),
        gaps=FixedGaps(skip),
    )
    request = make_request("a", prompt, 8)
    worker.admission.submit(request)
    first = worker.step().rows[0]
    assert first.start == first.draft_start == (24 if skip else 12)
    assert first.claim is not None and first.claim.frontier.joint == first.start
    worker.drain(50)
    assert request.output == reference(prompt, 8)
    oracle.check_published()
    oracle.cache.check()


def test_drafts_that_catch_up_alone_never_leave_a_gap() -> None:
    oracle = make_pair(0, coupling=Coupling.INDEPENDENT)
    serve(oracle, range(20))
    oracle.cache.pools["draft"].tree.evict(3)
    worker = OracleWorker(
        oracle,
        AdmissionLimits(max_batch=4, token_budget=64, chunk=None, max_queue=8, max_len=100),
        DraftShape(Coupling.INDEPENDENT, 0, 3),
        random.Random(0),
        gaps=FixedGaps(skip=True),
    )
    worker.admission.submit(make_request("a", range(20), 4))
    row = worker.step().rows[0]
    assert (row.start, row.draft_start) == (19, 8)
