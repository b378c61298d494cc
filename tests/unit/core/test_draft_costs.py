"""Costs of drafting that are learned from the times of steps."""

from random import Random

import pytest

from cluster.core.draft_costs import FixedCosts, MeasuredCosts

STEP, TOKEN, PASS = 0.010, 0.0005, 0.002


def fed(steps: int, depths: range, rng: Random, nodes: int = 1) -> MeasuredCosts:
    """Costs that saw so many steps of a machine with the times above."""
    costs = MeasuredCosts()
    for _ in range(steps):
        rows, depth, proposed = rng.randint(1, 8), rng.choice(depths), rng.choice(depths)
        tokens = rows * (1 + depth * nodes)
        target_s, draft_s = STEP + TOKEN * tokens, 0.001 + PASS * proposed
        costs.observe(rows, rows * depth * nodes, rows * depth, target_s, proposed, draft_s)
    return costs


@pytest.mark.parametrize("running", [1, 8, 32])
@pytest.mark.parametrize("nodes", [1, 4])
def test_they_find_the_times_of_the_machine(running: int, nodes: int) -> None:
    costs = fed(200, range(4), Random(0), nodes)
    expected = (PASS + TOKEN * running * nodes) / (STEP + TOKEN * running)
    assert costs.per_draft(running) == pytest.approx(expected, rel=1e-6)


def test_before_enough_steps_were_seen_the_prior_answers() -> None:
    costs = fed(15, range(4), Random(0))
    assert costs.per_draft(3) == FixedCosts().per_draft(3)


def test_a_depth_that_never_varied_bears_all_of_the_drafters_time() -> None:
    costs = fed(200, range(3, 4), Random(0))
    expected = (PASS + 0.001 / 3 + TOKEN) / (STEP + TOKEN)
    assert costs.per_draft(1) == pytest.approx(expected, rel=1e-6)


def test_a_machine_that_changes_is_noticed() -> None:
    costs = fed(200, range(4), Random(0))
    before = costs.per_draft(1)
    for depth in (0, 3) * 300:  # drafting has become ten times as slow
        costs.observe(1, depth, depth, STEP + TOKEN * (1 + depth), depth, 0.001 + 10 * PASS * depth)
    assert costs.per_draft(1) > 5 * before


def test_steps_of_one_size_show_no_price_of_a_token() -> None:
    costs = MeasuredCosts()
    for _ in range(50):
        costs.observe(1, 0, 0, STEP, 0, 0.0)
    assert costs.per_draft(1) == 0


def test_tokens_of_prompts_cost_what_longer_steps_took_longer() -> None:
    costs = MeasuredCosts(prior=FixedCosts(token=0.5))
    for tokens in (100, 300, 200):
        costs.observe_prompt(tokens, 0.004 + 0.0001 * tokens)
    assert costs.per_prompt_token() == 0.5, "before decode steps were seen"
    for _ in range(20):
        costs.observe(rows=1, drafts=3, verified_depth=3, target_s=0.006, depth=3, draft_s=0.002)
    assert costs.per_prompt_token() == pytest.approx(0.0001 / 0.008)
