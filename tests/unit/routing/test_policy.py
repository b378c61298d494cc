"""Costs: what a pool lacks is paid for, jointly or apart, and busy workers are dear."""

import random

import pytest

from cluster.core.handle import Coupling
from cluster.routing.policy import Candidate, CostModel, choose, cost_of, expected_frontier, prefill_weight
from cluster.routing.prefix_map import Depth
from tests.unit.routing.builders import BLOCK, chain, query, worker

COSTS = CostModel(target_token_ms=1.0, draft_token_ms=0.25, decode_request_ms=5.0, queued_request_ms=1000.0)
PROMPT = query(chain(*range(10)), tail=5)


def candidate(
    name: str, target: int, draft: int = 0, coupling: Coupling = Coupling.JOINT, in_flight: int = 0, prefill: int = 0
) -> Candidate:
    return Candidate(worker(name, coupling=coupling), Depth(target, draft), in_flight, float(prefill))


@pytest.mark.parametrize(
    ("coupling", "target_tokens", "draft_tokens"),
    [
        (Coupling.JOINT, 165 - 4 * BLOCK, 165 - 4 * BLOCK),
        (Coupling.INDEPENDENT, 165 - 8 * BLOCK, 165 - 4 * BLOCK),
        (Coupling.NONE, 165 - 8 * BLOCK, 0),
    ],
)
def test_pools_are_priced_by_how_the_draft_is_coupled(
    coupling: Coupling, target_tokens: int, draft_tokens: int
) -> None:
    cost = cost_of(PROMPT, candidate("a", 8, 4, coupling), COSTS)
    assert (cost.target_prefill, cost.draft_prefill) == (target_tokens, draft_tokens * 0.25)


def test_a_plain_request_is_priced_by_the_target_alone() -> None:
    plain = query(chain(*range(10)), tail=5, speculate=False)
    cost = cost_of(plain, candidate("a", 8, 0), COSTS)
    assert (cost.target_prefill, cost.draft_prefill) == (165 - 8 * BLOCK, 0)


def test_the_last_prompt_token_is_never_expected_to_be_reused() -> None:
    whole = query(chain(*range(4)), tail=0)
    frontier = expected_frontier(whole, worker(), Depth(4, 4))
    assert (frontier.target, frontier.draft, frontier.joint) == (63, 63, 63)


def test_joint_depth_beats_a_deeper_target_alone() -> None:
    deep_target, even = candidate("a", 9, 1), candidate("b", 6, 6)
    assert choose(PROMPT, [deep_target, even], COSTS, random.Random(0)) is even
    plain = query(chain(*range(10)), tail=5, speculate=False)
    assert choose(plain, [deep_target, even], COSTS, random.Random(0)) is deep_target


def test_load_outweighs_reuse_when_there_is_enough_of_it() -> None:
    idle = candidate("idle", 0)
    assert choose(PROMPT, [candidate("holder", 10, 10, in_flight=3), idle], COSTS, random.Random(0)) is not idle
    assert choose(PROMPT, [candidate("holder", 10, 10, in_flight=4), idle], COSTS, random.Random(0)) is idle
    assert choose(PROMPT, [candidate("holder", 10, 10, prefill=500), idle], COSTS, random.Random(0)) is idle


def test_in_a_crowded_fleet_requests_stay_with_their_prefix() -> None:
    holder, idle = candidate("holder", 10, 10, prefill=250), candidate("idle", 0)
    assert prefill_weight(PROMPT, 60.0, COSTS) == 1.0, "two fifths of a prompt's 165 ms are no crowd"
    assert choose(PROMPT, [holder, idle], COSTS, random.Random(0)) is idle
    crowded = prefill_weight(PROMPT, 165.0, COSTS)
    assert crowded == pytest.approx(1.0 + 2.0 * 0.6)
    assert choose(PROMPT, [holder, idle], COSTS, random.Random(0), crowded) is holder


def test_equal_candidates_share_the_load() -> None:
    rng = random.Random(7)
    equal = [candidate(name, 0) for name in "abcd"]
    chosen = [choose(PROMPT, equal, COSTS, rng) for _ in range(400)]
    counts = [sum(1 for each in chosen if each is one) for one in equal]
    assert min(counts) > 60


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose(PROMPT, [], COSTS, random.Random(0)) is None
