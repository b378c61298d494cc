"""Requests that can't be served are refused in one sentence, before anything is allocated; others don't notice."""

from pathlib import Path

import pytest

from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.errors import CapacityExceeded, ConfigError, InvalidRequest, ModelLoadError, PromptTooLarge
from tests.fixtures.prompts import TINY_EAGLE3, TINY_TARGET
from tests.integration.engine.support import eight_prompts, greedy, make_engine, reference, requests


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine("eagle3", max_len=300)


def refused(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 4) -> InvalidRequest:
    before = engine.stats()
    with pytest.raises(InvalidRequest) as caught:
        engine.add(EngineRequest("bad", prompt, greedy(max_tokens)))
    assert engine.stats() == before
    assert not engine.has_work()
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence
    return caught.value


def test_empty_prompt(engine: Engine) -> None:
    assert "at least one token" in str(refused(engine, ()))


@pytest.mark.parametrize("token", [-1, 2048, 2**31, 2**63])
def test_token_id_out_of_range(engine: Engine, token: int) -> None:
    error = refused(engine, (5, 6, token))
    assert error.field == "prompt[2]"
    assert error.value == str(token)
    assert "between 0 and 2047" in str(error)


def test_prompt_longer_than_the_model_allows(engine: Engine) -> None:
    error = refused(engine, (5,) * 300)
    assert "300 tokens long" in str(error)
    assert "between 1 and 299" in str(error)


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_max_tokens_too_small(engine: Engine, max_tokens: int) -> None:
    assert refused(engine, (5, 6), max_tokens).field == "max_tokens"


def test_huge_max_tokens_is_cut_to_what_the_model_allows(engine: Engine) -> None:
    (event,) = engine.generate([EngineRequest("huge", (5,) * 296, greedy(2**63, ignore_eos=True))])
    assert len(event.token_ids) == 4


def test_prompt_larger_than_a_pool() -> None:
    engine = make_engine("none", kv_bytes=2048 * 16 * 5)
    with pytest.raises(PromptTooLarge) as caught:
        engine.add(EngineRequest("bad", (5,) * 70, greedy(4)))
    assert (caught.value.needed_blocks, caught.value.available_blocks, caught.value.largest_prompt) == (5, 4, 61)
    (event,) = engine.generate([EngineRequest("fits", (5,) * 61, greedy(4, ignore_eos=True))])
    assert len(event.token_ids) == 4


def test_full_queue() -> None:
    engine = make_engine("none", max_queue=2)
    first, second, third = requests(eight_prompts()[:3], greedy(3))
    engine.add(first)
    engine.add(second)
    with pytest.raises(CapacityExceeded, match="retry later"):
        engine.add(third)
    assert engine.stats().waiting == 2


def test_id_in_use(engine: Engine) -> None:
    (request,) = requests(eight_prompts()[:1], greedy(3, ignore_eos=True))
    engine.add(request)
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.add(request)
    while engine.has_work():
        engine.step()


def test_others_do_not_notice(engine: Engine) -> None:
    """Refusals between the steps of a running request leave its tokens alone."""
    prompt = eight_prompts()[0]
    engine.add(EngineRequest("good", prompt, greedy(10, ignore_eos=True)))
    tokens: tuple[int, ...] = ()
    while engine.has_work():
        with pytest.raises(InvalidRequest):
            engine.add(EngineRequest("bad", (9_999,), greedy(4)))
        tokens += tuple(token for event in engine.step() for token in event.token_ids)
    assert tokens == reference(prompt, 20).tokens[:10]


# ------------------------------------------------------------ start-up


def test_budget_too_small_for_one_block() -> None:
    with pytest.raises(ConfigError, match=r"KV budget is 1000 bytes.*more KV memory"):
        make_engine("none", kv_bytes=1000)


def test_max_len_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match="max_len is 1000000"):
        make_engine("none", max_len=1_000_000)


def test_token_budget_below_the_batch() -> None:
    with pytest.raises(ConfigError, match="token_budget is 4"):
        make_engine("none", max_batch=8, token_budget=4)


def test_missing_model() -> None:
    with pytest.raises(ModelLoadError, match="must be an existing folder"):
        Engine(EngineConfig(Path("/nowhere")))


def test_draft_that_is_not_named() -> None:
    with pytest.raises(ConfigError, match="name the draft's folder"):
        Engine(EngineConfig(TINY_TARGET, method="draft_model"))  # type: ignore[arg-type]


def test_an_eagle3_head_is_no_target() -> None:
    with pytest.raises(ModelLoadError):
        Engine(EngineConfig(TINY_EAGLE3))


def test_both_pools_stay_within_the_one_budget() -> None:
    for method in ("none", "draft_model", "eagle3"):
        for kv_bytes in (200_000, 1 << 20, 5_000_001):
            engine = make_engine(method, kv_bytes=kv_bytes, draft_block_size=8)
            tensors = [t for kv in engine.parts.kv.values() for t in (*kv.keys, *kv.values)]
            used = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            assert kv_bytes / 2 < used <= kv_bytes
