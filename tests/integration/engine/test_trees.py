"""Trees of drafts change nothing but speed: tokens, text, log-probabilities and KV are those of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from cluster.core.sampling import SamplingParams
from cluster.engine.audit import PublishedSequence
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.speculation.lookahead import SpeculationMethod, drafts_trees
from cluster.speculation.tree import TreeShape
from tests.fixtures.prompts import TINY_DRAFTS, count_prompts, mixed_prompts, repeat_prompts
from tests.integration.engine.support import (
    METHODS,
    ROOMY,
    eight_prompts,
    encode,
    greedy,
    make_engine,
    requests,
    run_all,
    tokenizer,
)
from tests.integration.engine.test_exactness import (
    BYTES_PER_TOKEN,
    TIGHT_BLOCK_SIZE,
    TIGHT_BLOCKS,
    Tally,
    compare_alone,
    compare_batch,
)
from tests.integration.engine.test_kv_audit import run_schedule

TREE_METHODS = [method for method in METHODS if drafts_trees(method) and method in TINY_DRAFTS]
SMALL, LARGE = TreeShape(2, 6), TreeShape(5, 30)
GREEDY = greedy(24)
HOT = SamplingParams(max_tokens=24, temperature=0.9, seed=7, ignore_eos=True)
PARAMS = {
    "greedy": GREEDY,
    "hot": HOT,
    "truncated": replace(HOT, top_k=20, top_p=0.9, min_p=0.02),
    "penalties": replace(HOT, presence_penalty=0.4, frequency_penalty=0.3, repetition_penalty=1.2, min_tokens=6),
}


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    assert len(tally.near_ties) <= tally.tokens / 10_000, tally.near_ties


@pytest.mark.parametrize(
    ("reuse", "chunk", "tight"),
    [(True, 1, False), (True, 7, True), (True, 64, False), (False, 1, True), (False, 7, False), (False, 64, True)],
)
@pytest.mark.parametrize("method", TREE_METHODS)
def test_greedy_tokens_are_those_of_transformers(
    method: SpeculationMethod, reuse: bool, chunk: int, tight: bool, tally: Tally
) -> None:
    block_size = TIGHT_BLOCK_SIZE if tight else 16
    kv_bytes = (TIGHT_BLOCKS + 1) * block_size * BYTES_PER_TOKEN[method] if tight else ROOMY
    tree = SMALL if chunk == 7 else LARGE
    engine = make_engine(method, reuse=reuse, chunk=chunk, kv_bytes=kv_bytes, block_size=block_size, tree=tree)
    where = f"{method}, {reuse=}, {chunk=}, {tight=}"
    compare_batch(engine, tally, where)
    compare_alone(engine, tally, where)
    stats = engine.stats()
    assert stats.failed_steps == 0
    assert stats.accepted > 0
    assert (stats.preemptions > 0) == tight
    for meters in stats.pools.values():
        assert meters.in_use == meters.reserved == 0


@cache
def plain(kind: str) -> list[RequestEvent]:
    return run_all(make_engine(reuse=False, chunk=None), eight_prompts(), replace(PARAMS[kind], logprobs=3))


@pytest.mark.parametrize(("kind", "budget"), [("greedy", 20), ("hot", 512), ("truncated", 20), ("penalties", 512)])
@pytest.mark.parametrize("method", TREE_METHODS)
def test_a_seed_gives_the_same_tokens_and_logprobs(method: SpeculationMethod, kind: str, budget: int) -> None:
    """Where the step's budget is scarce, trees are cut to what fits."""
    engine = make_engine(method, tree=LARGE, token_budget=budget)
    for _ in ("cold", "warm"):
        for event, want in zip(
            run_all(engine, eight_prompts(), replace(PARAMS[kind], logprobs=3)), plain(kind), strict=True
        ):
            assert (event.token_ids, event.text, event.finish) == (want.token_ids, want.text, want.finish)
            assert event.logprobs is not None and want.logprobs is not None
            for got, expected in zip(event.logprobs, want.logprobs, strict=True):
                assert got.token_id == expected.token_id
                assert got.logprob == pytest.approx(expected.logprob, abs=1e-3)
                assert [value for _, value in got.top] == pytest.approx([v for _, v in expected.top], abs=1e-3)
    assert engine.stats().accepted > 0


@pytest.mark.parametrize("at", range(1, 12, 3))
def test_stop_strings_end_an_answer_in_the_middle_of_accepted_drafts(at: int) -> None:
    engine = make_engine("eagle3", tree=LARGE)
    plain_engine = make_engine()
    for number, prompt in enumerate(eight_prompts()):
        (whole,) = plain_engine.generate([EngineRequest(f"w{number}", prompt, GREEDY)])
        stop = whole.text[at : at + 3]
        params = replace(GREEDY, stop=(stop,))
        (want,) = plain_engine.generate([EngineRequest(f"p{number}", prompt, params)])
        (got,) = engine.generate([EngineRequest(f"s{number}", prompt, params)])
        assert (got.token_ids, got.text, got.finish) == (want.token_ids, want.text, want.finish)
        # What was computed before the stop is published; the rest of the path is not.
        assert all(pool.ok for pool in engine.audit([PublishedSequence((*prompt, *whole.token_ids))]))


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("method", TREE_METHODS)
def test_published_kv_is_what_one_forward_computes(method: SpeculationMethod, chunk: int, tight: bool) -> None:
    kv_bytes = 72 * 4 * 2560 if tight else ROOMY
    engine = make_engine(method, chunk=chunk, kv_bytes=kv_bytes, block_size=4, tree=LARGE)
    sequences = run_schedule(engine, seed=chunk)
    stats = engine.stats()
    assert (stats.preemptions > 0) == tight
    assert stats.accepted > 0
    for result in engine.audit(sequences):
        assert result.compared > 100, result
        assert result.ok, result


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4])
def test_short_answers_and_the_last_position_bound_the_depth(max_tokens: int) -> None:
    prompt = eight_prompts()[0]
    want = make_engine().generate(requests([prompt], greedy(4, ignore_eos=True)))[0].token_ids
    for engine in (
        make_engine("eagle3", tree=LARGE),
        make_engine("eagle3", tree=LARGE, max_len=len(prompt) + max_tokens),
    ):
        (event,) = engine.generate(requests([prompt], greedy(max_tokens, ignore_eos=True)))
        assert event.token_ids == want[:max_tokens]
        assert event.usage is not None
        assert (event.usage.drafted > 0) == (max_tokens > 2)  # the first token comes without drafts, the last too


def drafted(engine: Engine, params: SamplingParams, name: str) -> list[tuple[int, ...]]:
    """Of each answer: its tokens, and how it was drafted."""
    prompts = [
        encode(p.text) for p in (*mixed_prompts(4, seed=1), *count_prompts(3, seed=1), *repeat_prompts(3, seed=1))
    ]
    events = engine.generate(requests(prompts, params, name))
    stats = []
    for event in events:
        assert event.usage is not None
        stats.append((*event.token_ids, event.usage.draft_steps, event.usage.drafted, event.usage.accepted))
    return stats


@pytest.mark.parametrize("kind", ["greedy", "truncated"])
@pytest.mark.parametrize("method", TREE_METHODS)
def test_trees_are_accepted_more_often_than_chains_and_as_often_with_reuse(
    method: SpeculationMethod, kind: str
) -> None:
    lengths = []
    for tree in (None, SMALL, LARGE):
        engine = make_engine(method, reuse=False, tree=tree)
        cold = drafted(engine, PARAMS[kind], "plain")
        lengths.append(engine.stats().acceptance_length or 0)
        warm = make_engine(method, tree=tree)
        assert drafted(warm, PARAMS[kind], "cold") == cold
        assert drafted(warm, PARAMS[kind], "warm") == cold
    print(f"{method}, {kind}: chains, small and large trees yield {lengths} tokens a step")
    assert lengths[0] < lengths[1] < lengths[2]


def test_text_is_that_of_the_tokens() -> None:
    for event in run_all(make_engine("eagle3", tree=LARGE), eight_prompts(), greedy(24, ignore_eos=True)):
        assert event.text == tokenizer().decode(event.token_ids, skip_special_tokens=True)
