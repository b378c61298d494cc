"""The oracle with a real model: published KV of both pools equals a fresh, unchunked, uncached recomputation."""

import random

import pytest

from cluster.engine.audit import PoolAudit, PublishedSequence
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.speculation.lookahead import SpeculationMethod, has_draft_kv
from tests.integration.engine.support import METHODS, eight_prompts, greedy, make_engine, requests

SAMPLING = greedy(24, ignore_eos=True)


def run_schedule(engine: Engine, seed: int) -> list[PublishedSequence]:
    """Requests arrive at random steps, some are cancelled, some continue the answers of others; then all have ended."""
    rng = random.Random(seed)
    waiting = requests(eight_prompts(), SAMPLING, "first")
    tokens = {request.request_id: request.prompt for request in waiting}
    turns = 0
    while waiting or engine.has_work():
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.add(waiting.pop())
        if rng.random() < 0.05:
            engine.cancel(rng.choice(list(tokens)))
        for event in engine.step():
            tokens[event.request_id] += event.token_ids
            if event.finish is not None and turns < 6:
                turns += 1
                follow_up = EngineRequest(f"turn{turns}", (*tokens[event.request_id], 7, 8, 9, turns), SAMPLING)
                tokens[follow_up.request_id] = follow_up.prompt
                waiting.append(follow_up)
    return [PublishedSequence(sequence) for sequence in tokens.values()]


def by_pool(results: list[PoolAudit]) -> dict[str, PoolAudit]:
    return {result.pool: result for result in results}


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("chunk", [7, 64, None])
@pytest.mark.parametrize("method", METHODS)
def test_published_kv_is_what_one_forward_computes(method: SpeculationMethod, chunk: int | None, tight: bool) -> None:
    kv_bytes = 72 * 4 * 2560 if tight else 4 << 20
    engine = make_engine(method, chunk=chunk, kv_bytes=kv_bytes, block_size=4)
    sequences = run_schedule(engine, seed=chunk or 3)
    assert (engine.stats().preemptions > 0) == tight
    results = engine.audit(sequences)
    expected = {"target", "draft"} if has_draft_kv(method) else {"target"}
    assert by_pool(results).keys() == expected
    for result in results:
        assert result.compared > 100, result
        assert result.ok, result


def test_the_audit_covers_all_that_was_published_in_a_roomy_pool() -> None:
    engine = make_engine("eagle3", block_size=4)
    (event,) = engine.generate(requests(eight_prompts()[:1], SAMPLING))
    tokens = (*eight_prompts()[0], *event.token_ids)
    results = by_pool(engine.audit([PublishedSequence(tokens)]))
    # The last token was never computed, and the draft's last slot needs a successor.
    assert results["target"].compared >= len(tokens) - 2
    assert results["draft"].compared >= len(tokens) - 2


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_the_audit_finds_one_wrong_number(pool: str) -> None:
    engine = make_engine("eagle3", block_size=4)
    (event,) = engine.generate(requests(eight_prompts()[:1], SAMPLING))
    sequences = [PublishedSequence((*eight_prompts()[0], *event.token_ids))]
    assert all(result.ok for result in engine.audit(sequences))
    kv = engine.parts.kv[pool]
    used = next(block for block in range(kv.num_blocks) if kv.values[0][block].any())
    kv.values[0][used, 2, 0, 0] += 0.01
    assert [result.pool for result in engine.audit(sequences) if not result.ok] == [pool]


def test_the_audit_leaves_the_pools_as_they_were() -> None:
    engine = make_engine("eagle3", block_size=4)
    sequences = run_schedule(engine, seed=1)
    before = engine.stats().pools
    engine.audit(sequences)
    assert engine.stats().pools == before


def test_audit_mode_checks_by_itself_when_idle() -> None:
    engine = make_engine("eagle3", block_size=4, audit=True)
    engine.generate(requests(eight_prompts()[:2], SAMPLING))
    engine.parts.kv["target"].values[2].mul_(1.5)
    with pytest.raises(RuntimeError, match="published KV differs"):
        engine.generate(requests(eight_prompts()[:1], greedy(2), "again"))
