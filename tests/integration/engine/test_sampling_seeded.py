"""Seeded sampling is a function of prompt, parameters and seed, whatever speculation, reuse, chunks and company do."""

from collections.abc import Sequence
from functools import cache

import pytest

from cluster.core.sampling import SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from tests.fixtures.prompts import TINY_TARGET
from tests.integration.engine.support import eight_prompts, make_engine

METHODS = ["none", "ngram", "draft_model", "eagle3", "oracle"]
PARAMS = {
    "temperature": SamplingParams(20, temperature=0.9, seed=7, ignore_eos=True),
    "hot": SamplingParams(20, temperature=1.6, seed=2**63 - 1, ignore_eos=True),
    "top": SamplingParams(20, temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=3, ignore_eos=True),
    "penalties": SamplingParams(
        20, temperature=0.8, seed=5, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=6
    ),
}


@cache
def engine_for(method: str, reuse: bool) -> Engine:
    options = {"reuse": reuse, "chunk": 24 if reuse else None}
    if method == "oracle":
        return make_engine("draft_model", draft=TINY_TARGET, **options)  # type: ignore[arg-type]
    return make_engine(method, **options)  # type: ignore[arg-type]


def answers(engine: Engine, sampling: SamplingParams, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    events = engine.generate([EngineRequest(f"s{i}", prompt, sampling) for i, prompt in enumerate(prompts)])
    return [event.token_ids for event in events]


@cache
def expected(kind: str) -> list[tuple[int, ...]]:
    """Each prompt alone, without reuse or speculation."""
    engine = make_engine("none", reuse=False, chunk=None)
    return [answers(engine, PARAMS[kind], [prompt])[0] for prompt in eight_prompts()]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_in_any_company(method: str, reuse: bool, kind: str) -> None:
    engine = engine_for(method, reuse)
    assert answers(engine, PARAMS[kind], eight_prompts()) == expected(kind)
    assert answers(engine, PARAMS[kind], eight_prompts()[2:3]) == expected(kind)[2:3]


def test_a_draft_that_races_with_the_same_clocks_is_accepted() -> None:
    """The target as its own draft: only drafts cut off by the end of a request are lost, at any temperature."""
    engine = make_engine("draft_model", draft=TINY_TARGET)
    for kind in ("temperature", "hot", "top"):
        answers(engine, PARAMS[kind], eight_prompts())
    assert engine.stats().accepted > 0.95 * engine.stats().drafted


def nearly_uniform(seed: int | None = None) -> SamplingParams:
    """Twenty tokens so random that two answers never agree by chance."""
    return SamplingParams(20, temperature=10.0, seed=seed, ignore_eos=True)


def test_seeds_matter_and_a_request_without_one_is_not_repeated() -> None:
    engine, prompt = engine_for("none", True), eight_prompts()[0]
    seeded = [answers(engine, nearly_uniform(seed), [prompt])[0] for seed in range(4)]
    free = [answers(engine, nearly_uniform(), [prompt])[0] for _ in range(4)]
    assert len(set(seeded)) == 4
    assert len(set(free)) == 4


def test_two_requests_of_one_prompt_and_batch_with_different_seeds_differ() -> None:
    engine, prompt = engine_for("none", True), eight_prompts()[0]
    events = engine.generate([EngineRequest(f"d{i}", prompt, nearly_uniform(i)) for i in range(3)])
    assert len({event.token_ids for event in events}) == 3
