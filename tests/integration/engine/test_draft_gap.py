"""A gap in the draft's pool: whichever way it is dealt with, the tokens are the same, and nothing wrong is published."""

from dataclasses import replace

import pytest

from cluster.core.handle import Coupling
from cluster.engine.engine import Engine
from cluster.engine.events import RequestEvent
from cluster.speculation.lookahead import coupling_of
from tests.integration.engine.support import METHODS, eight_prompts, greedy, make_engine, requests, run_all

JOINT = [str(method) for method in METHODS if coupling_of(method) is Coupling.JOINT]


def long_prompt(number: int = 0) -> tuple[int, ...]:
    prompts = eight_prompts()
    return sum((prompts[(number + i) % 8] for i in range(3)), ())


def after_the_draft_lost_its_blocks(engine: Engine, prompt: tuple[int, ...], **options: object) -> RequestEvent:
    """Serves a prompt twice; in between, the draft's pool gives up all that it holds."""
    sampling = replace(greedy(24, ignore_eos=True), **options)  # type: ignore[arg-type]
    engine.generate(requests([prompt], sampling, name="first"))
    engine.parts.cache.pools["draft"].tree.evict(10**6)
    return engine.generate(requests([prompt], sampling, name="second"))[0]


@pytest.mark.parametrize("method", JOINT)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_token_depends_on_how_gaps_are_dealt_with(method: str, temperature: float) -> None:
    sampling = replace(greedy(24, ignore_eos=True), temperature=temperature, seed=5)
    prompt = long_prompt()
    expected = run_all(make_engine("none"), [prompt], sampling)[0].token_ids
    for gap in ("clip", "skip", "auto"):
        engine = make_engine(method, draft_gap=gap, audit=True)
        event = after_the_draft_lost_its_blocks(engine, prompt, temperature=temperature, seed=5)
        assert event.token_ids == expected
        assert all(result.ok for result in engine.audit())


@pytest.mark.parametrize("method", JOINT)
@pytest.mark.parametrize("sizes", [(16, 16), (16, 32), (8, 4)])
def test_what_is_skipped_is_not_computed_again(method: str, sizes: tuple[int, int]) -> None:
    prompt = long_prompt()
    engine = make_engine(method, draft_gap="skip", audit=True, block_size=sizes[0], draft_block_size=sizes[1])
    usage = after_the_draft_lost_its_blocks(engine, prompt).usage
    assert usage is not None and usage.reused_draft == 0
    assert len(prompt) - sizes[1] - 1 <= usage.reused_joint == usage.reused_target // sizes[1] * sizes[1]
    clipped = after_the_draft_lost_its_blocks(make_engine(method, draft_gap="clip"), prompt).usage
    assert clipped is not None and clipped.reused_joint == 0


def test_a_request_with_a_hole_publishes_target_blocks_only() -> None:
    prompt = long_prompt()
    engine = make_engine("eagle3", draft_gap="skip", audit=True)
    after_the_draft_lost_its_blocks(engine, prompt)
    assert engine.parts.cache.meters()["draft"].cached == 0
    assert engine.parts.cache.meters()["target"].cached * 16 >= len(prompt) + 23


@pytest.mark.parametrize("method", JOINT)
def test_holes_among_other_requests_and_small_pools(method: str) -> None:
    """Gaps arise by themselves where the draft's pool is small: plain requests' prompts come back with speculation."""
    prompts = [long_prompt(i) for i in range(6)]
    expected = [event.token_ids for event in run_all(make_engine("none"), prompts, greedy(16, ignore_eos=True))]
    engine = make_engine(method, draft_gap="skip", audit=True, chunk=48)
    sampling = greedy(16, ignore_eos=True)
    engine.generate(requests(prompts[:4], sampling, name="plain", speculate=False))
    events = engine.generate(requests(prompts, sampling, name="spec"))
    assert [event.token_ids for event in events] == expected
    assert any(event.usage is not None and event.usage.reused_joint > event.usage.reused_draft for event in events)
    assert all(result.ok for result in engine.audit())
