"""Greedy float32 output is the same tokens whatever the engine does to be fast: the whole matrix against transformers.

{every method} x {reuse on, off} x {chunk 16, 64, unchunked} x {alone, 8 in a batch} x {roomy
pools, pools so small that requests are preempted}. Where the two best logits nearly tie, rounding may choose either;
such places are counted, and there may be one in 10,000 tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from cluster.engine.engine import Engine
from tests.integration.engine.support import (
    METHODS,
    NEAR_TIE,
    ROOMY,
    eight_prompts,
    first_difference,
    greedy,
    make_engine,
    reference,
    requests,
)

MAX_TOKENS = 20
SAMPLING = greedy(MAX_TOKENS, ignore_eos=True)
# Bytes of KV per token in both pools. 46 blocks of 4 hold the longest of the eight requests (45), but not two of them.
BYTES_PER_TOKEN = {
    "none": 2048,
    "ngram": 2048,
    "suffix": 2048,
    "draft_model": 2560,
    "pard": 2560,
    "dflash": 3072,
    "eagle": 2560,
    "eagle3": 2560,
    "peagle": 3072,
    "mtp_eagle": 2560,
    "mtp": 3072,
    "medusa": 2048,
}
TIGHT_BLOCKS, TIGHT_BLOCK_SIZE = 46, 4


@dataclass
class Tally:
    """How much was compared, and where rounding decided."""

    tokens: int = 0
    near_ties: list[str] = field(default_factory=list)

    def compare(self, got: tuple[int, ...], prompt: tuple[int, ...], where: str) -> None:
        want = reference(prompt, MAX_TOKENS)
        at = first_difference(got, want.tokens)
        self.tokens += MAX_TOKENS if at is None else at + 1
        if at is None:
            return
        assert at < len(got) == MAX_TOKENS, f"{where}: {len(got)} tokens"
        assert want.gaps[at] < NEAR_TIE, f"{where}: token {at} is {got[at]}, transformers has {want.tokens[at]}"
        self.near_ties.append(f"{where}: token {at}")


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    tally = Tally()
    yield tally
    assert len(tally.near_ties) <= tally.tokens / 10_000, tally.near_ties


def compare_alone(engine: Engine, tally: Tally, where: str) -> None:
    for name, prompt in zip("ab", eight_prompts()[::4], strict=True):
        (event,) = engine.generate(requests([prompt], SAMPLING, name))
        tally.compare(event.token_ids, prompt, f"{where}, alone, {name}")


def compare_batch(engine: Engine, tally: Tally, where: str) -> None:
    for event, prompt in zip(engine.generate(requests(eight_prompts(), SAMPLING)), eight_prompts(), strict=True):
        tally.compare(event.token_ids, prompt, f"{where}, in a batch, {event.request_id}")


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("chunk", [16, 64, None])
@pytest.mark.parametrize("reuse", [True, False], ids=["reuse", "no reuse"])
@pytest.mark.parametrize("method", METHODS)
def test_greedy_tokens_are_those_of_transformers(
    method: str, reuse: bool, chunk: int | None, tight: bool, tally: Tally
) -> None:
    block_size = TIGHT_BLOCK_SIZE if tight else 16
    kv_bytes = (TIGHT_BLOCKS + 1) * block_size * BYTES_PER_TOKEN[method] if tight else ROOMY
    engine = make_engine(method, reuse=reuse, chunk=chunk, kv_bytes=kv_bytes, block_size=block_size)
    where = f"{method}, {reuse=}, {chunk=}, {tight=}"
    compare_batch(engine, tally, where)
    compare_alone(engine, tally, where)
    stats = engine.stats()
    assert stats.failed_steps == 0
    assert (stats.preemptions > 0) == tight
    assert (stats.drafted > 0) == (method != "none")
    for meters in stats.pools.values():
        assert meters.in_use == meters.reserved == 0
        assert (meters.cached > 0) == reuse


def test_all_requests_reuse_what_the_others_computed(tally: Tally) -> None:
    """The same prompts again, cold and warm and while others run: same tokens, and reuse is what makes them cheap."""
    engine = make_engine("eagle3", chunk=32)
    compare_batch(engine, tally, "cold")
    computed = engine.stats().computed
    events = engine.generate(requests(eight_prompts(), SAMPLING, "warm"))
    for event, prompt in zip(events, eight_prompts(), strict=True):
        tally.compare(event.token_ids, prompt, "warm")
        assert event.usage is not None
        assert event.usage.reused_joint >= len(prompt) - 2
    assert engine.stats().computed - computed < computed / 2


@pytest.mark.parametrize(("block_size", "draft_block_size"), [(1, None), (8, 32), (32, 4)])
@pytest.mark.parametrize("method", ["draft_model", "eagle3", "dflash"])
def test_block_sizes_of_the_two_pools_are_independent(
    method: str, block_size: int, draft_block_size: int | None, tally: Tally
) -> None:
    engine = make_engine(method, block_size=block_size, draft_block_size=draft_block_size, chunk=24)
    for where in ("cold", "warm"):
        compare_batch(engine, tally, f"{method}, blocks of {block_size} and {draft_block_size}, {where}")
