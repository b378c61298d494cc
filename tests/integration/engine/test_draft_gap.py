"""A gap in the draft's pool: whichever way it is met, the tokens are the same, and nothing wrong is published."""

from dataclasses import replace
from functools import cache

import pytest

from cluster.core.handle import Coupling
from cluster.core.sampling import SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.events import RequestEvent
from cluster.speculation.lookahead import coupling_of
from tests.integration.engine.support import METHODS, eight_prompts, greedy, make_engine, requests, run_all

JOINT = [str(method) for method in METHODS if coupling_of(method) is Coupling.JOINT]
GREEDY = greedy(16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=5)


@cache
def long_prompts() -> tuple[tuple[int, ...], ...]:
    prompts = eight_prompts()
    return tuple(prompts[i] + prompts[(i + 3) % 8] for i in range(5))


@cache
def plain(sampling: SamplingParams) -> list[tuple[int, ...]]:
    """The tokens of each long prompt without speculation."""
    return [tuple(event.token_ids) for event in run_all(make_engine("none"), long_prompts(), sampling)]


def after_the_draft_lost_its_blocks(engine: Engine, number: int, sampling: SamplingParams = GREEDY) -> RequestEvent:
    """Serves a prompt twice; in between, the draft's pool gives up all that it holds."""
    prompt = long_prompts()[number]
    engine.generate(requests([prompt], sampling, name="first"))
    engine.parts.cache.pools["draft"].tree.evict(10**6)
    return engine.generate(requests([prompt], sampling, name="second"))[0]


@pytest.mark.parametrize("method", JOINT)
def test_behind_a_hole_every_mode_yields_the_tokens_of_plain_decoding(method: str) -> None:
    engine = make_engine(method, draft_gap="skip", audit=True, chunk=48)
    for number, sampling in enumerate((GREEDY, SAMPLED)):
        event = after_the_draft_lost_its_blocks(engine, number, sampling)
        assert tuple(event.token_ids) == plain(sampling)[number]
        assert event.usage is not None and event.usage.reused_draft == 0
        assert event.usage.reused_joint >= len(long_prompts()[number]) - 17
    # Gaps arise by themselves where prompts of plain requests come back with speculation.
    engine.generate(requests(long_prompts()[2:4], GREEDY, name="plain", speculate=False))
    events = engine.generate(requests(long_prompts(), GREEDY, name="speculative"))
    assert [tuple(event.token_ids) for event in events] == plain(GREEDY)
    usages = [event.usage for event in events[2:4] if event.usage is not None]
    assert all(usage.reused_joint > usage.reused_draft for usage in usages)
    assert all(result.ok for result in engine.audit())


@pytest.mark.parametrize("gap", ["clip", "auto"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_other_choices_yield_them_too(gap: str, sampling: SamplingParams) -> None:
    engine = make_engine("eagle3", draft_gap=gap, audit=True)
    event = after_the_draft_lost_its_blocks(engine, 0, sampling)
    assert tuple(event.token_ids) == plain(sampling)[0]
    assert event.usage is not None and (gap == "auto" or event.usage.reused_joint == 0)
    assert all(result.ok for result in engine.audit())


@pytest.mark.parametrize("sizes", [(16, 32), (8, 4)])
def test_a_hole_ends_with_a_block_of_the_draft(sizes: tuple[int, int]) -> None:
    engine = make_engine("eagle3", draft_gap="skip", audit=True, block_size=sizes[0], draft_block_size=sizes[1])
    event = after_the_draft_lost_its_blocks(engine, 0)
    assert tuple(event.token_ids) == plain(GREEDY)[0]
    assert event.usage is not None
    assert event.usage.reused_joint == event.usage.reused_target // sizes[1] * sizes[1]


def test_a_request_with_a_hole_publishes_target_blocks_only() -> None:
    engine = make_engine("eagle3", draft_gap="skip", audit=True)
    after_the_draft_lost_its_blocks(engine, 0)
    meters = engine.parts.cache.meters()
    assert meters["draft"].cached == 0
    assert meters["target"].cached * 16 >= len(long_prompts()[0]) + 15
