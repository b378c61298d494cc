"""A simulated worker's clock, against sums that can be made by hand."""

from dataclasses import replace

import pytest

from cluster.bench.route.request import Outcome, SimRequest
from cluster.bench.route.timing import WorkerSpec
from cluster.bench.route.worker import SimWorker
from cluster.core.handle import Coupling
from tests.unit.bench.route.builders import BLOCK, SPEC, request


def serve(worker: SimWorker, *requests: SimRequest) -> dict[int, Outcome]:
    """Submits them when they arrive, and lets the worker run until all have ended."""
    left, ended = sorted(requests, key=lambda each: each.at), dict[int, Outcome]()
    while left or worker.wakes_at is not None:
        if left and (worker.wakes_at is None or left[0].at < worker.wakes_at):
            arriving = left.pop(0)
            worker.submit(arriving, arriving.at)
        else:
            assert worker.wakes_at is not None
            ended |= {job.request.number: out for job, out in worker.wake(worker.wakes_at) if out is not None}
    return ended


def worker(spec: WorkerSpec = SPEC) -> SimWorker:
    return SimWorker(0, spec, BLOCK)


def test_a_cold_prompt_takes_its_prefill_in_both_models_and_a_step() -> None:
    outcome = serve(worker(), request(prompt=range(5)))[0]
    assert outcome.ttft == pytest.approx((10 + 550 * 1.1) / 1000)
    assert outcome.end_to_end == outcome.ttft, "one token asked for"
    plain = serve(worker(), request(prompt=range(5), speculative=False))[0]
    assert plain.ttft == pytest.approx((10 + 550) / 1000), "a plain request costs the draft nothing"


def test_a_long_prompt_is_computed_in_chunks() -> None:
    outcome = serve(worker(), request(prompt=range(25)))[0]
    assert outcome.ttft == pytest.approx((3 * 10 + 2550 * 1.1) / 1000)


def test_decoding_takes_a_step_for_every_two_tokens_or_for_each_of_a_plain_request() -> None:
    outcome = serve(worker(), request(prompt=range(5), output=21))[0]
    assert outcome.end_to_end - outcome.ttft == pytest.approx(10 * (10 + 1 + 5) / 1000)
    plain = serve(worker(), request(prompt=range(5), output=21, speculative=False))[0]
    assert plain.end_to_end - plain.ttft == pytest.approx(20 * (10 + 1) / 1000)


def test_an_arrival_waits_for_the_step_under_way_and_no_longer() -> None:
    alone = serve(worker(), request(0, range(5), output=201))[0]
    arrives = alone.ttft + 3.5 * 0.016
    both = serve(worker(), request(0, range(5), output=201), request(1, range(10, 12), at=arrives))
    assert both[1].ttft == pytest.approx(0.5 * 0.016 + (10 + 1 + 5 + 250 * 1.1) / 1000)
    assert both[0].end_to_end == pytest.approx(alone.end_to_end + 250 * 1.1 / 1000)


def test_a_prompt_seen_before_is_reused_up_to_its_last_token() -> None:
    outcomes = serve(worker(), request(0, range(5)), request(1, range(5), tail=0, at=5.0))
    assert (outcomes[1].reused_target, outcomes[1].reused_draft, outcomes[1].reused_joint) == (499, 499, 499)
    assert outcomes[1].ttft == pytest.approx((10 + 1.1) / 1000)


def test_after_a_plain_request_a_hidden_state_draft_starts_from_nothing() -> None:
    after_plain = [request(0, range(5), speculative=False), request(1, range(5), at=5.0)]
    joint = serve(worker(), *after_plain)[1]
    assert (joint.reused_target, joint.reused_draft, joint.reused_joint) == (500, 0, 0)
    assert joint.ttft == pytest.approx((10 + 550 * 1.1) / 1000), "the target computes again what the draft must see"
    apart = serve(worker(replace(SPEC, coupling=Coupling.INDEPENDENT)), *after_plain)[1]
    assert apart.ttft == pytest.approx((10 + 50 + 550 * 0.1) / 1000), "a draft that reads tokens catches up alone"


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    outcomes = serve(worker(), *(request(number, range(5)) for number in range(3)))
    assert [outcomes[number].reused_joint for number in range(3)] == [0, 500, 500]


def test_a_full_batch_and_a_full_pool_let_requests_wait_in_order() -> None:
    five = [request(number, range(10 * number, 10 * number + 2), output=101) for number in range(5)]
    outcomes = serve(worker(), *five)
    assert outcomes[4].ttft > min(outcomes[number].end_to_end for number in range(4)), "max_running is 4"
    small = replace(SPEC, pool_tokens=1000)
    big = [request(number, range(10 * number, 10 * number + 6), output=50) for number in range(2)]
    outcomes = serve(worker(small), *big)
    assert outcomes[1].ttft > outcomes[0].end_to_end
