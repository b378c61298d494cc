"""How well drafts do: alike with and without reuse, alone and in a batch, and as well as they were trained to."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.core.sampling import SamplingParams
from cluster.engine.audit import PublishedSequence
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import RequestEvent
from cluster.speculation.lookahead import SpeculationMethod, has_draft_kv, joint_reuse_eligible
from tests.fixtures.prompts import (
    TINY_DRAFTS,
    TINY_TARGET,
    Prompt,
    chat_turns,
    count_prompts,
    mixed_prompts,
    repeat_prompts,
    shared_system_prompts,
)
from tests.integration.engine.support import ROOMY, eight_prompts, encode, greedy, make_engine, reference, requests

DRAFTING = tuple(method for method in SpeculationMethod if method is not SpeculationMethod.NONE)
GREEDY = greedy(24)
HOT = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.95, seed=7)

Stats = tuple[tuple[int, ...], int, int, int]


def ids(prompts: list[Prompt]) -> list[tuple[int, ...]]:
    return [encode(prompt.text) for prompt in prompts]


def stats(event: RequestEvent) -> Stats:
    """The output, and how it was drafted."""
    assert event.usage is not None
    return event.token_ids, event.usage.draft_steps, event.usage.drafted, event.usage.accepted


def forgetful(method: SpeculationMethod, **options: bool) -> Engine:
    """An engine whose drafts depend on the request alone, not on outputs of past ones."""
    return make_engine(method, cached_requests=0, **options)


def run(engine: Engine, prompts: list[tuple[int, ...]], params: SamplingParams, name: str) -> list[RequestEvent]:
    return engine.generate(requests(prompts, params, name))


@pytest.mark.parametrize("params", [GREEDY, HOT], ids=["greedy", "hot"])
@pytest.mark.parametrize("method", DRAFTING)
def test_reuse_changes_nothing_about_acceptance(method: SpeculationMethod, params: SamplingParams) -> None:
    """Exactly, in float32: a reused draft KV slot is the slot that the request would have computed."""
    prompts = ids([*shared_system_prompts(4, seed=3), *repeat_prompts(3, seed=2), *chat_turns(seed=4)[:3]])
    plain = [stats(event) for event in run(forgetful(method, reuse=False), prompts, params, "plain")]
    engine = forgetful(method)
    assert [stats(event) for event in run(engine, prompts, params, "cold")] == plain
    warm = run(engine, prompts, params, "warm")
    assert [stats(event) for event in warm] == plain
    for event, prompt in zip(warm, prompts, strict=True):
        assert event.usage is not None
        if joint_reuse_eligible(method):
            span = engine.parts.drafter.shape.span if engine.parts.drafter else None
            assert event.usage.reused_joint == len(prompt) - max(1, span or 0)
        assert event.usage.reused_target == len(prompt) - 1


@pytest.mark.parametrize("method", DRAFTING)
def test_a_batch_changes_nothing_about_acceptance(method: SpeculationMethod) -> None:
    prompts = ids(mixed_prompts(6, seed=8))
    together = run(forgetful(method, reuse=False), prompts, GREEDY, "together")
    engine = forgetful(method, reuse=False)
    alone = [run(engine, [prompt], GREEDY, f"alone{i}")[0] for i, prompt in enumerate(prompts)]
    assert [stats(event) for event in together] == [stats(event) for event in alone]


@pytest.mark.parametrize("method", DRAFTING)
def test_a_request_that_continues_another_reuses_its_answer_too(method: SpeculationMethod) -> None:
    """The KV of accepted tokens was rewritten from real inputs, so drafting on top of it goes as well as afresh."""
    engine = forgetful(method)
    first = ids(repeat_prompts(1, seed=6))[0]
    answer = run(engine, [first], replace(GREEDY, ignore_eos=True), "first")[0]
    second = first + answer.token_ids + encode("<|end|><|user|>Repeat that.<|end|><|assistant|>")
    warm = run(engine, [second], GREEDY, "second")[0]
    assert warm.usage is not None
    # All but the last token of the answer was computed, and the draft may lack the lookahead of one more.
    assert warm.usage.reused_target >= len(first) + len(answer.token_ids) - 1
    if joint_reuse_eligible(method):
        assert warm.usage.reused_joint >= len(first) + len(answer.token_ids) - 2
    cold = run(forgetful(method, reuse=False), [second], GREEDY, "cold")[0]
    assert stats(warm) == stats(cold)


def test_a_seed_gives_the_same_tokens_with_every_method() -> None:
    """Sampled hot, truncated and penalised, whether drafted or not, cold or warm, chunked or not."""
    prompts = ids(mixed_prompts(6, seed=9))
    params = replace(HOT, temperature=1.2, top_k=50, repetition_penalty=1.1, presence_penalty=0.4, ignore_eos=True)
    plain = [event.token_ids for event in run(make_engine(reuse=False, chunk=None), prompts, params, "plain")]
    assert len(set(plain)) == len(plain)
    for method in DRAFTING:
        engine = make_engine(method, chunk=16)
        for name in ("cold", "warm"):
            assert [event.token_ids for event in run(engine, prompts, params, name)] == plain


# Tokens a step that the tiny drafts reach at least, chains of 3; see the figures in docs/benchmarks.md.
BOUNDS = {
    SpeculationMethod.NGRAM: 1.02,
    SpeculationMethod.SUFFIX: 1.7,
    SpeculationMethod.DRAFT_MODEL: 1.6,
    SpeculationMethod.PARD: 2.3,
    SpeculationMethod.DFLASH: 2.6,
    SpeculationMethod.EAGLE: 1.8,
    SpeculationMethod.EAGLE3: 1.8,
    SpeculationMethod.PEAGLE: 2.4,
    SpeculationMethod.MTP: 2.4,
    SpeculationMethod.MTP_EAGLE: 2.7,
    SpeculationMethod.MEDUSA: 1.6,
}


@pytest.mark.parametrize("method", DRAFTING)
def test_tiny_drafts_are_accepted(method: SpeculationMethod) -> None:
    prompts = ids([*count_prompts(8, seed=1), *mixed_prompts(16, seed=1), *repeat_prompts(8, seed=1)])
    engine = make_engine(method)
    run(engine, prompts, GREEDY, "r")
    length = engine.stats().acceptance_length
    print(f"{method}: {length:.3f} tokens a step")
    assert length is not None and length >= BOUNDS[method]


@pytest.mark.parametrize("method", [method for method in DRAFTING if has_draft_kv(method)])
def test_beyond_the_drafts_last_position_the_target_goes_on_alone(method: SpeculationMethod, tmp_path: Path) -> None:
    """A draft that can hold 50 positions: longer requests, reused ones too, give the same tokens without drafts."""
    draft = Path(shutil.copytree(TINY_DRAFTS[method], tmp_path / "short"))
    config = json.loads((draft / "config.json").read_text())
    (config.get("transformer_layer_config") or config)["max_position_embeddings"] = 50
    (draft / "config.json").write_text(json.dumps(config))
    engine = Engine(EngineConfig(TINY_TARGET, draft, method, kv_bytes=ROOMY))
    short, long = encode("<|user|>Count from 3 to 40.<|end|><|assistant|>"), max(eight_prompts(), key=len)
    for name in ("cold", "warm"):
        for prompt in (short, long):
            (event,) = run(engine, [prompt], greedy(40, ignore_eos=True), f"{name}{len(prompt)}")
            assert event.token_ids == reference(prompt, 40).tokens
            assert event.usage is not None
            assert (event.usage.drafted > 0) == (prompt is short)
            assert all(pool.ok for pool in engine.audit([PublishedSequence((*prompt, *event.token_ids))]))


def test_suffix_decoding_learns_from_the_answers_to_the_same_questions() -> None:
    """Each tenant from its own, and the answers stay the same."""
    engine, prompts = make_engine(SpeculationMethod.SUFFIX), ids(mixed_prompts(6, seed=4))
    runs = [
        engine.generate(requests(prompts, GREEDY, name, tenant_salt=tenant))
        for name, tenant in [("first", b"red"), ("again", b"red"), ("other", b"blue")]
    ]
    first, again, other = ([stats(event) for event in events] for events in runs)
    assert [answer for answer, *_ in first] == [answer for answer, *_ in again]
    assert first == other
    lengths = [1 + sum(accepted for *_, accepted in run) / sum(steps for _, steps, *_ in run) for run in (first, again)]
    assert lengths[1] > 3 > lengths[0]


def test_a_request_that_declines_speculation_is_not_drafted_for() -> None:
    engine = make_engine(SpeculationMethod.EAGLE3)
    prompts = ids(repeat_prompts(2, seed=1))
    [plain] = engine.generate(requests(prompts[:1], GREEDY, "plain", speculate=False))
    [drafted] = engine.generate(requests(prompts[:1], GREEDY, "drafted"))
    assert plain.usage is not None and drafted.usage is not None
    assert (plain.usage.draft_steps, plain.usage.drafted) == (0, 0)
    assert drafted.usage.draft_steps > 0
    assert plain.token_ids == drafted.token_ids
