"""Who waits, who runs, who gives way: order, bounds, budgets and refusals."""

import random
from dataclasses import replace
from typing import Any

import pytest

from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.drafts import Drafts
from cluster.core.handle import Coupling
from cluster.core.request import FinishReason, RequestStatus
from cluster.errors import CapacityExceeded, InvalidRequest, PromptTooLarge
from tests.unit.core.oracle import make_pair
from tests.unit.core.oracle_worker import OracleWorker, make_request, reference

LIMITS = AdmissionLimits(max_batch=4, token_budget=32, chunk=None, max_queue=50, max_len=200)


def make_worker(blocks: int = 64, drafts: int = 2, guess: float = 0.6, **limits: Any) -> OracleWorker:
    positions = limits.pop("max_positions", None)
    shape = DraftShape(Coupling.JOINT, 1, drafts, positions)
    return OracleWorker(make_pair(blocks=blocks), replace(LIMITS, **limits), shape, random.Random(0), guess)


def ran(worker: OracleWorker, now: float = 0.0) -> list[str]:
    """Steps, and says whose rows ran."""
    return [row.request.request_id for row in worker.step(now).rows]


# ------------------------------------------------------------ order


def test_requests_run_in_order_of_arrival_and_priorities_go_ahead() -> None:
    worker = make_worker(max_batch=2)
    for name, priority in (("a", 0), ("b", 0), ("urgent", -1)):
        worker.admission.submit(make_request(name, [ord(name[0])] * 5, 4, priority=priority))
    assert ran(worker) == ["urgent", "a"]


def test_nobody_starves_however_many_urgent_requests_arrive() -> None:
    aging, length = 10, 3
    worker = make_worker(max_batch=1, drafts=0, aging=aging)
    patient = make_request("patient", [1] * 4, length, priority=2)
    worker.admission.submit(patient)
    for step in range(200):
        worker.admission.submit(make_request(f"urgent{step}", [step % 3] * 4, 1, priority=0))
        worker.step()
        if patient.status is RequestStatus.FINISHED:
            break
    # Those that arrived within 2 levels of aging may go ahead, at a step each; then it is its turn.
    assert worker.admission.num_waiting > 0
    assert step <= 2 * aging + length + 1


def test_the_backlog_is_what_prompts_still_lack() -> None:
    worker = make_worker(drafts=0, token_budget=8, chunk=6)
    worker.admission.submit(make_request("a", [1] * 20, 4))
    assert worker.admission.backlog == 19, "the last token is the first decode's"
    worker.step()
    assert worker.admission.backlog == 13
    while worker.admission.has_work():
        worker.step()
    assert worker.admission.backlog == 0


def test_decoding_goes_before_prompts_and_shares_the_step_with_a_chunk() -> None:
    worker = make_worker(drafts=0, token_budget=8, chunk=6)
    worker.admission.submit(make_request("a", [1] * 4, 10))
    assert ran(worker) == ["a"]
    worker.admission.submit(make_request("b", [2] * 20, 4))
    plan = worker.step()
    assert [(row.request.request_id, len(row.tokens)) for row in plan.rows] == [("a", 1), ("b", 6)]
    worker.admission.submit(make_request("c", [0] * 20, 4))
    plan = worker.step()
    assert [(row.request.request_id, len(row.tokens)) for row in plan.rows] == [("a", 1), ("b", 6), ("c", 1)]


def test_drafts_give_way_to_the_budget_before_rows_do() -> None:
    worker = make_worker(drafts=4, token_budget=4, guess=0.0)
    for name in "abc":
        worker.admission.submit(make_request(name, [ord(name)], 20))
    for _ in range(6):
        plan = worker.step()
        assert plan.num_tokens <= 4
    assert [row.num_drafts for row in plan.rows] == [1, 0, 0]


# ------------------------------------------------------------ sharing


def test_the_second_of_two_equal_prompts_waits_for_the_first() -> None:
    worker = make_worker(token_budget=64)
    prompt = list(range(20))
    for name in "ab":
        worker.admission.submit(make_request(name, prompt, 4))
    worker.admission.submit(make_request("other", [9] * 8, 4))
    assert ran(worker) == ["a", "other"]
    plan = worker.step()
    second = next(row for row in plan.rows if row.request.request_id == "b")
    assert len(second.tokens) == 1, "all but the last token is reused"
    worker.drain(20)


def test_nobody_waits_for_a_block_that_is_not_being_computed() -> None:
    worker = make_worker(token_budget=4, chunk=3)
    for name in "ab":  # the first chunk doesn't complete a block
        worker.admission.submit(make_request(name, range(9), 2))
    assert ran(worker) == ["a", "b"]


def test_prompts_that_must_not_be_shared_do_not_wait() -> None:
    worker = make_worker(token_budget=64)
    for name in "ab":
        worker.admission.submit(make_request(name, range(20), 4, reuse=False))
    assert ran(worker) == ["a", "b"]


# ------------------------------------------------------------ giving way


def test_the_last_in_rank_is_preempted_and_gets_its_own_tokens_all_the_same() -> None:
    worker = make_worker(blocks=8, drafts=2)
    requests = [make_request(name, [ord(name)] * 9, 14) for name in "abc"]
    for request in requests:
        worker.admission.submit(request)
    worker.drain(100)
    assert requests[0].preemptions == 0 < requests[2].preemptions
    for request in requests:
        assert request.output == reference(request.prompt, 14)


def test_drafts_are_given_up_before_anybody_is_preempted() -> None:
    worker = make_worker(blocks=3, drafts=4)
    request = make_request("a", range(6), 6)  # needs all of the target's blocks; drafts would take one more
    worker.admission.submit(request)
    worker.drain(20)
    assert request.preemptions == 0
    assert request.output == reference(range(6), 6)


def test_an_urgent_request_takes_the_place_of_a_less_urgent_one() -> None:
    worker = make_worker(max_batch=1)
    slow = make_request("slow", [1] * 4, 30, priority=1)
    worker.admission.submit(slow)
    worker.step()
    worker.admission.submit(make_request("urgent", [2] * 4, 2))
    plan = worker.step()
    assert [row.request.request_id for row in plan.rows] == ["urgent"]
    assert plan.preempted == (slow,)
    worker.drain(60)
    assert slow.output == reference([1] * 4, 30)


# ------------------------------------------------------------ bounds


def test_drafts_never_reach_beyond_what_can_be_used() -> None:
    for limits in ({"max_len": 12}, {"max_positions": 12}, {}):
        worker = make_worker(drafts=4, guess=1.0, **limits)
        request = make_request("a", range(5), 7)
        worker.admission.submit(request)
        while worker.admission.has_work():
            for row in worker.step().rows:
                assert row.target_end <= 12
                assert len(request.output) + len(request.drafts) <= 7
        assert request.output == reference(range(5), 7)


def test_trees_are_cut_by_number_to_the_budget_and_by_depth_to_what_can_be_used() -> None:
    tree = Drafts((0, 1, 2, 0, 1, 2), (None, None, 0, 2, 3, 1))
    for budget, answer, kept in ((32, 6, tree), (4, 6, tree.first(3)), (32, 3, tree.within(1)), (3, 4, tree.first(2))):
        worker = make_worker(drafts=4, token_budget=budget, max_batch=1)
        request = make_request("a", [1] * 3, answer)
        worker.admission.submit(request)
        ran(worker)
        request.drafts = tree
        (row,) = worker.admission.plan(0.0).rows
        assert row.drafts == kept
        assert row.tokens[row.num_known :] == kept.tokens


def test_expired_requests_end_whether_they_wait_or_run() -> None:
    worker = make_worker(max_batch=1)
    requests = [make_request(name, [1] * 4, 50, deadline=5.0) for name in "ab"]
    for request in requests:
        worker.admission.submit(request)
    worker.step(now=4.9)
    plan = worker.step(now=5.0)
    assert set(plan.expired) == set(requests) and not plan.rows
    assert all(request.finish is FinishReason.DEADLINE for request in requests)
    assert all(meters.in_use == 0 for meters in worker.oracle.cache.meters().values())


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    worker = make_worker(max_queue=2)
    for name in "ab":
        worker.admission.submit(make_request(name, [1], 1))
    with pytest.raises(CapacityExceeded, match="the limit is 2") as refusal:
        worker.admission.submit(make_request("c", [1], 1))
    assert refusal.value.retry_after_s > 0
    worker.drain(10)


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers() -> None:
    worker = make_worker(blocks=5)
    with pytest.raises(PromptTooLarge) as refusal:
        worker.admission.submit(make_request("a", range(15), 7))
    error = refusal.value
    assert (error.needed_blocks, error.available_blocks, error.largest_prompt) == (6, 5, 14)
    worker.admission.submit(make_request("a", range(14), 7))
    worker.drain(20)


def test_what_the_length_limit_forbids_needs_no_room() -> None:
    worker = make_worker(blocks=5, max_len=20)
    request = make_request("a", range(10), 1000)
    worker.admission.submit(request)
    for _ in range(20):
        worker.step()
        if len(request.output) >= 10:
            worker.admission.finish(request, FinishReason.LENGTH)
    assert request.output == reference(range(10), 10)


def test_a_draft_pool_that_is_too_small_costs_speculation_not_the_request() -> None:
    oracle = make_pair(draft_blocks=2)
    worker = OracleWorker(oracle, LIMITS, DraftShape(Coupling.JOINT, 1, 2), random.Random(0))
    request = make_request("a", range(12), 6)
    worker.admission.submit(request)
    worker.drain(20)
    assert request.output == reference(range(12), 6)
    assert oracle.cache.meters()["draft"].free == 2


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ((), "0 tokens long"),
        ((1,) * 200, "from 1 to 199 tokens long"),
        ((1, -1), "vocabulary"),
        ((2**32,), "vocabulary"),
    ],
)
def test_a_prompt_that_is_no_prompt_is_refused_and_leaves_nothing(prompt: tuple[int, ...], problem: str) -> None:
    worker = make_worker()
    with pytest.raises(InvalidRequest, match=problem):
        worker.admission.submit(make_request("a", prompt, 3))
    assert not worker.admission.has_work()


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    worker = make_worker()
    worker.admission.submit(make_request("a", [1, 2], 3))
    with pytest.raises(InvalidRequest, match="request_id"):
        worker.admission.submit(make_request("a", [1], 3))
    plan = worker.admission.plan(0.0)
    worker.admission.cancel("a")
    fresh = make_request("a", [5], 3)
    worker.admission.submit(fresh)
    worker.run(plan)  # rows of the first "a" must not touch the second
    assert fresh.output == []
    worker.drain(10)
    assert fresh.output == reference([5], 3)


def test_limits_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="chunk is 0"):
        replace(LIMITS, chunk=0)
    with pytest.raises(ValueError, match="token_budget is 3, but must be at least max_batch, 4"):
        replace(LIMITS, token_budget=3)
