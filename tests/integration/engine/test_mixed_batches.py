"""One batch of requests that differ in everything: each one's output is what it gets alone, without speculation."""

from dataclasses import dataclass, field, replace
from functools import cache

import pytest

from cluster.core.draft_length import Acceptance
from cluster.core.request import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.speculation.lookahead import SpeculationMethod, drafts_trees
from cluster.speculation.tree import TreeShape
from tests.fixtures.prompts import TINY_TARGET
from tests.integration.engine.support import ROOMY, eight_prompts, greedy, make_engine, tokenizer

DRAFTING = [str(method) for method in SpeculationMethod if method is not SpeculationMethod.NONE]
TREES = [f"{method}_tree" for method in SpeculationMethod if drafts_trees(method)]
# The target drafts for itself, so that every draft is accepted and stop strings fall inside of accepted runs.
ORACLE = "oracle"

HOT = SamplingParams(max_tokens=30, temperature=1.1, seed=5)
SAMPLING = (
    greedy(30, ignore_eos=True),
    HOT,
    replace(HOT, top_k=40, min_p=0.02, ignore_eos=True),
    replace(HOT, top_p=0.8, presence_penalty=0.6, frequency_penalty=0.2, max_tokens=17),
    greedy(40, repetition_penalty=1.3, logprobs=2),
    greedy(1),
    greedy(2, ignore_eos=True),
    replace(HOT, temperature=0.4, min_tokens=6),
)


@dataclass
class Uneven:
    """A draft length of its own for each request and step: 0 to 3, whatever was accepted."""

    chosen: set[int] = field(default_factory=set)
    asked: int = 0

    def choose(self, acceptance: Acceptance, running: int, most: int) -> int:
        self.asked += 1
        length = min(most, self.asked * 7 % 5)
        self.chosen.add(length)
        return length


@cache
def mixed() -> tuple[EngineRequest, ...]:
    """Every kind of sampling, then stop strings out of the answers themselves; each third doesn't speculate."""
    prompts = eight_prompts()
    kinds = list(zip(prompts, SAMPLING, strict=True))
    engine = make_engine("none", reuse=False)
    for number, prompt in enumerate(prompts[:4]):
        [answer] = engine.generate([EngineRequest("plain", prompt, greedy(30, ignore_eos=True))])
        at = 6 + 3 * number
        kinds.append((prompt, greedy(30, ignore_eos=True, stop=(answer.text[at : at + 4],))))
        kinds.append((prompt, greedy(30, ignore_eos=True, stop_token_ids=(answer.token_ids[4 + number],))))
    return tuple(
        EngineRequest(f"r{i}", prompt, params, priority=i % 2, speculate=i % 3 != 2)
        for i, (prompt, params) in enumerate(kinds)
    )


@cache
def alone() -> dict[str, RequestEvent]:
    """Each request by itself, one token at a time."""
    engine = make_engine("none", reuse=False)
    return {request.request_id: engine.generate([request])[0] for request in mixed()}


def engine_of(mode: str, kv_bytes: int = ROOMY) -> Engine:
    if mode == ORACLE:
        return make_engine("draft_model", draft=TINY_TARGET, max_batch=16, chunk=24)
    tree = TreeShape(3, 8) if mode in TREES else None
    return make_engine(
        mode.removesuffix("_tree"),
        tree=tree,
        kv_bytes=kv_bytes,
        block_size=4 if kv_bytes < ROOMY else 16,
        max_batch=16,
        chunk=24,
    )


def compare(events: list[RequestEvent]) -> None:
    for request, event in zip(mixed(), events, strict=True):
        expected = alone()[request.request_id]
        where = f"{request.request_id}: {request.sampling}"
        assert event.token_ids == expected.token_ids, where
        assert (event.text, event.finish) == (expected.text, expected.finish), where
        assert event.usage is not None
        assert request.speculate or event.usage.drafted == 0
        if expected.logprobs is not None:
            assert event.logprobs is not None
            assert [entry.token_id for entry in event.logprobs] == [entry.token_id for entry in expected.logprobs]
            assert [entry.logprob for entry in event.logprobs] == pytest.approx(
                [entry.logprob for entry in expected.logprobs], abs=1e-4
            )


def test_the_requests_differ_in_how_they_end() -> None:
    finishes = [event.finish for event in alone().values()]
    assert finishes.count(FinishReason.STOP) >= 6 and finishes.count(FinishReason.LENGTH) >= 4
    stopped = [event for request, event in zip(mixed(), alone().values(), strict=True) if request.sampling.stop]
    assert all(event.finish is FinishReason.STOP and 1 < len(event.token_ids) < 30 for event in stopped)
    assert any(event.text != tokenizer().decode(event.token_ids) for event in stopped), "ends before the stop string"


@pytest.mark.parametrize("mode", [*DRAFTING, *TREES, ORACLE])
def test_each_request_gets_what_it_gets_alone(mode: str) -> None:
    """Cold, then warm with lengths of drafts that change from row to row."""
    engine = engine_of(mode)
    compare(engine.generate(mixed()))
    lengths = engine.parts.admission.lengths = Uneven()
    compare(engine.generate(mixed()))
    assert lengths.chosen >= {0, 1, 2}
    stats = engine.stats()
    assert stats.drafted > 0 and stats.failed_steps == 0
    assert all(meters.in_use == meters.reserved == 0 for meters in stats.pools.values())
    if mode == ORACLE:
        assert stats.acceptance_length is not None and stats.acceptance_length > 2


@pytest.mark.parametrize("mode", ["suffix", "draft_model", "eagle3", "eagle3_tree"])
def test_requests_that_come_and_go_change_nothing_for_the_others(mode: str) -> None:
    """One arrives a step, in pools that hold a few of them only, and some are cancelled."""
    engine = engine_of(mode, kv_bytes=80 * 4 * (2048 if mode == "suffix" else 2560))
    waiting, events = list(mixed()), {request.request_id: RequestEvent(request.request_id) for request in mixed()}
    cancelled = {"r1", "r8"}
    steps = 0
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0))
        steps += 1
        for event in engine.step():
            events[event.request_id] = events[event.request_id].then(event)
        if steps in (4, 12):
            engine.cancel("r1" if steps == 4 else "r8")
    assert engine.stats().preemptions > 0
    for request_id, event in events.items():
        expected = alone()[request_id].token_ids
        assert event.token_ids == (expected[: len(event.token_ids)] if request_id in cancelled else expected)
