"""What a router believes of a worker's load: heartbeats, what was placed since, and time."""

import random

import pytest

from cluster.routing.eligibility import Eligibility
from cluster.routing.health import Leases
from cluster.routing.policy import CostModel, cost_of
from cluster.routing.prefix_map import NOTHING, Depth
from cluster.routing.report_order import ReportOrder
from cluster.routing.reservations import Work
from cluster.routing.shortlist import SHORTLIST, shortlist
from cluster.routing.types import PoolUsage, WorkerLoad
from cluster.routing.worker_state import WorkerState
from tests.unit.routing.builders import BLOCK, chain, query, worker

COSTS = CostModel(target_token_ms=1.0, draft_token_ms=0.0, decode_request_ms=5.0, queued_request_ms=1000.0)
PROMPT = query(chain(*range(10)), tail=5)


def state(name: str = "a", **options: int) -> WorkerState:
    return WorkerState(worker(name, **options), ReportOrder(1), COSTS, reservation_s=2.0)


def work(tokens: int, lacking: int) -> Work:
    return Work(tokens, lacking, prefill_ms=float(lacking))


def backlog_ms(believed: WorkerState, now: float) -> float:
    return believed.candidate(NOTHING, now).backlog_ms


def test_a_backlog_shrinks_as_time_passes() -> None:
    believed = state()
    believed.heard(WorkerLoad(running=1, prefill_tokens=800), now=10.0)
    assert backlog_ms(believed, 10.0) == pytest.approx(800)
    assert backlog_ms(believed, 10.5) == pytest.approx(300)
    assert backlog_ms(believed, 11.0) == 0


def test_a_waiting_prompt_counts_with_what_it_lacks_from_placement_to_its_first_token() -> None:
    believed = state()
    believed.place("r1", work(1000, 900), now=0.0)
    believed.place("r2", work(1000, 100), now=0.0)
    assert (backlog_ms(believed, 0.0), believed.in_flight) == (1000, 2)
    believed.heard(WorkerLoad(running=1, waiting=1, prefill_tokens=1900, started=("r1", "r2")), now=0.0)
    assert (backlog_ms(believed, 0.0), believed.in_flight) == (1000, 2), "not the 1,900 that the worker says"
    believed.heard(WorkerLoad(running=1, waiting=1, prefill_tokens=1300), now=0.6)
    assert backlog_ms(believed, 0.6) == pytest.approx(300 + 100)
    believed.heard(WorkerLoad(running=2, waiting=0, prefill_tokens=60), now=1.0)
    assert backlog_ms(believed, 1.0) == pytest.approx(60)


def test_prefill_of_requests_that_others_placed_counts_as_the_worker_says() -> None:
    believed = state()
    believed.place("r1", work(1000, 100), now=0.0)
    believed.heard(WorkerLoad(running=1, waiting=2, prefill_tokens=5000, started=("r1",)), now=0.0)
    assert backlog_ms(believed, 0.0) == pytest.approx(4000 + 100)


def test_attention_makes_the_end_of_a_long_prompt_dear() -> None:
    costs = CostModel(target_token_ms=1.0, target_context_ms=0.01)
    assert costs.target_ms(0, 100) == pytest.approx(100 + 50)
    assert costs.target_ms(900, 100) == pytest.approx(100 + 950)
    believed = WorkerState(worker(), ReportOrder(1), costs, reservation_s=2.0)
    believed.place("r1", Work(1000, 1000, costs.target_ms(0, 1000)), now=0.0)
    believed.heard(WorkerLoad(running=1, prefill_tokens=100, started=("r1",)), now=0.0)
    assert backlog_ms(believed, 0.0) == pytest.approx(100 + 950)


def test_a_full_pool_and_what_must_be_evicted_are_paid_for() -> None:
    costs = CostModel(target_token_ms=1.0, draft_token_ms=0.0, queued_request_ms=1000.0, eviction_weight=0.5)
    roomy, tight, full = (WorkerState(worker(name), ReportOrder(1), costs, reservation_s=2.0) for name in "abc")
    for believed, free, cached in ((roomy, 20, 0), (tight, 4, 16), (full, 0, 5)):
        pool = PoolUsage("target", 64, free, cached, in_use=64 - free - cached)
        believed.heard(WorkerLoad(running=2, pools=(pool,)), now=0.0)
    costs_of = [cost_of(PROMPT, believed.candidate(NOTHING, 0.0), costs) for believed in (roomy, tight, full)]
    assert [cost.eviction for cost in costs_of] == [0, 0.5 * (165 - 4 * BLOCK), 0.5 * 165]
    held = (64 - 5) * BLOCK / 2
    assert [cost.queue for cost in costs_of] == [0, 0, pytest.approx(1000 * (165 - 5 * BLOCK) / held)]


def test_better_acceptance_makes_shared_steps_cheaper() -> None:
    slow, fast = state("a"), state("b")
    slow.heard(WorkerLoad(running=2, acceptance=1.0), now=0.0)
    fast.heard(WorkerLoad(running=2, acceptance=2.0), now=0.0)
    decode = [cost_of(PROMPT, believed.candidate(NOTHING, 0.0), COSTS).decode for believed in (slow, fast)]
    assert decode == [10.0, 5.0]


def test_only_workers_of_the_model_that_live_and_did_not_fail_are_eligible() -> None:
    leases, states = Leases(3.0), [state(name) for name in "abcd"]
    eligibility = Eligibility(leases)

    def alive(now: float, exclude: str = "") -> str:
        asked = query(exclude=frozenset(exclude))
        return "".join(believed.worker_id for believed in eligibility.alive(asked, states, now))

    assert alive(0.0) == ""
    for believed in states[:3]:
        leases.grant(believed.worker_id, 1, 0.0)
    assert alive(0.5) == "abc"
    assert alive(0.5, exclude="c") == "ab"
    leases.suspect("b", 1)
    assert alive(0.6) == "ac"
    for now in (0.7, 0.8):
        leases.renew("b", 1, now)
    assert alive(0.9) == "abc"
    leases.renew("c", 1, 2.0)
    assert alive(3.1) == "bc", "the lease of a has run out, without any event"
    assert alive(3.9) == "c"
    leases.renew("a", 1, 4.0)
    assert alive(4.1) == "ac", "a late heartbeat is a sign of life"
    leases.revoke("c")
    assert alive(4.2) == "a"


def test_a_worker_without_a_free_place_is_not_shortlisted() -> None:
    states = [state(name, max_running=1, max_queue=1) for name in "ab"]
    for number in range(2):
        states[0].place(f"r{number}", work(1, 1), now=0.0)
    assert shortlist(PROMPT, states, {}, 1.0, 0.0, random.Random(0)) == states[1:]


def test_the_shortlist_has_the_holders_worth_it_and_the_idle() -> None:
    states = [state(f"w{number}") for number in range(60)]
    for believed in states[:50]:
        believed.heard(WorkerLoad(running=1, prefill_tokens=500), now=0.0)
    depths = {"w3": Depth(10, 10), "w4": Depth(10, 0), "w55": Depth(4, 4)}
    short = [believed.worker_id for believed in shortlist(PROMPT, states, depths, 1.0, 0.0, random.Random(0))]
    assert len(short) == SHORTLIST
    assert short[0] == "w55", "64 tokens saved and nothing to do"
    assert set(short[1:]) < {f"w{number}" for number in range(50, 60)}, "500 ms of waiting outweigh 160 tokens"
    for believed in states[:50]:
        believed.heard(WorkerLoad(running=1, prefill_tokens=100), now=0.0)
    short = [believed.worker_id for believed in shortlist(PROMPT, states, depths, 1.0, 0.0, random.Random(0))]
    assert "w3" in short and "w4" not in short, "a hidden-state draft without KV saves nothing"
    plain = query(chain(*range(10)), tail=5, speculate=False)
    short = [believed.worker_id for believed in shortlist(plain, states, depths, 1.0, 0.0, random.Random(0))]
    assert {"w3", "w4"} <= set(short)


def test_among_equals_the_shortlist_is_drawn() -> None:
    states, rng, drawn = [state(f"w{number}") for number in range(40)], random.Random(1), set[str]()
    for _ in range(60):
        drawn |= {believed.worker_id for believed in shortlist(PROMPT, states, {}, 1.0, 0.0, rng)}
    assert len(drawn) == 40
