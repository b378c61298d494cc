"""Draft KV: what a drafter writes equals a fresh computation, however the work was cut, packed, reused or rejected."""

from dataclasses import replace
from random import Random

import pytest
import torch

from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler, SampleRow
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from tests.fixtures.prompts import TINY_TARGET
from tests.unit.speculation.drafting import (
    BLOCK_SIZE,
    GREEDY,
    KV_METHODS,
    Sequenced,
    assert_slots_equal,
    expected_kv,
    new_drafter,
    noisy_pool,
    pool_of,
    prompts,
    scattered_blocks,
    target,
)

methods = pytest.mark.parametrize("method", KV_METHODS)


@methods
@pytest.mark.parametrize("chunk", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 1000])
def test_chunks_of_any_size_write_what_one_pass_writes(method: SpeculationMethod, chunk: int) -> None:
    """The last slot of a chunk sees the prompt's own next token, and the drafts that follow are the same."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    tokens = list(prompts(1, 35, 60)[0])
    sequence = Sequenced(drafter, tokens, scattered_blocks(0))
    while sequence.cursor + chunk < sequence.end:
        assert drafter.propose([sequence.task(end=sequence.cursor + chunk)]) == [()]
    drafts = sequence.propose()
    assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, tokens))
    assert drafts == Sequenced(drafter, tokens, scattered_blocks(1)).propose()


@methods
def test_a_packed_batch_drafts_what_each_request_drafts_alone(method: SpeculationMethod) -> None:
    """Lengths, K, chunks and temperatures are mixed; no row sees another's tokens."""
    drafter = new_drafter(method)
    tokens = [list(ids) for ids in prompts(4, 20, 60)]
    hot = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, presence_penalty=0.3)

    def sequences() -> list[Sequenced]:
        return [
            Sequenced(drafter, ids, scattered_blocks(i), params=hot if i % 2 else GREEDY, request_id=f"r{i}")
            for i, ids in enumerate(tokens)
        ]

    wanted = (3, 1, 0, 2)
    kv = pool_of(drafter)
    together = sequences()
    packed = drafter.propose([sequence.task(k=k) for sequence, k in zip(together, wanted, strict=True)])
    for sequence in together:
        assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, sequence.tokens))
    pool_of(drafter)
    assert packed == [sequence.propose(k) for sequence, k in zip(sequences(), wanted, strict=True)]
    assert [len(drafts) for drafts in packed] == list(wanted)


@methods
def test_rejected_drafts_leave_no_trace(method: SpeculationMethod) -> None:
    """Rounds that accept nothing, some or all: known slots always hold what known tokens imply."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    random = Random(3)
    sequence = Sequenced(drafter, list(prompts(1, 20, 60)[0]), scattered_blocks(0))
    for accepted in (0, 3, 1, 0, 2, 3):
        drafts = sequence.propose()
        assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, sequence.tokens))
        sequence.tokens += [*drafts[:accepted], random.randrange(6, 2048)]


@methods
def test_reused_slots_are_read_and_never_written(method: SpeculationMethod) -> None:
    """A request that starts at the depth of a shared prefix drafts as if it had computed everything itself."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    first, second = (list(ids) for ids in prompts(2, 40, 60))
    shared = 3 * BLOCK_SIZE
    second[: shared + 1] = first[: shared + 1]
    writer = Sequenced(drafter, first, scattered_blocks(0))
    writer.propose()
    before = [tensor[list(writer.blocks[:3])].clone() for tensor in (*kv.keys, *kv.values)]
    # The claim went a few tokens less deep than the shared blocks: those are recomputed, into the trash block.
    reader = Sequenced(drafter, second, writer.blocks[:3] + scattered_blocks(1), cursor=shared - 5, held=shared)
    drafts = reader.propose()
    after = [tensor[list(writer.blocks[:3])] for tensor in (*kv.keys, *kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert_slots_equal(kv, reader.blocks, reader.end, expected_kv(drafter, second))
    assert drafts == Sequenced(drafter, second, scattered_blocks(2)).propose()


@methods
def test_a_resumed_request_feeds_the_draft_its_output_too(method: SpeculationMethod) -> None:
    """After preemption prompt and output are prefilled in chunks; a chunk may end inside the output."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    tokens = list(prompts(1, 35, 60)[0])
    sequence = Sequenced(drafter, tokens, scattered_blocks(0), prompt=20)
    for end in (19, 20, 21, 30):
        drafter.propose([sequence.task(end=end)])
    sequence.propose()
    assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, tokens))


@methods
def test_drafting_stops_at_the_drafts_last_position(method: SpeculationMethod) -> None:
    drafter = new_drafter(method)
    tokens = list(prompts(1, 20, 60)[0])
    free = Sequenced(drafter, tokens, scattered_blocks(0)).propose()
    end = Sequenced(drafter, tokens, ()).end
    for room, count in ((0, 1), (1, 2), (2, 3), (5, 3)):
        drafter.shape = replace(drafter.shape, max_positions=end + room)
        assert Sequenced(drafter, tokens, scattered_blocks(1)).propose() == free[:count]
    drafter.shape = replace(drafter.shape, max_positions=end - 1)
    with pytest.raises(ValueError, match="the draft holds"):
        Sequenced(drafter, tokens, scattered_blocks(1)).propose()


@methods
def test_tasks_that_break_the_contract_are_refused_before_anything_is_written(method: SpeculationMethod) -> None:
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    before = [tensor.clone() for tensor in (*kv.keys, *kv.values)]
    sequence = Sequenced(drafter, list(prompts(1, 20, 60)[0]), scattered_blocks(0))
    task = sequence.task(k=3)
    for broken in (
        replace(task, end=task.end + 1),
        replace(task, start=task.end),
        replace(task, start=task.end + 1),
        replace(task, end=task.end - 1),
    ):
        with pytest.raises(ValueError, match="slots"):
            drafter.propose([replace(task, k=0), broken])
    assert all(torch.equal(a, b) for a, b in zip(before, (*kv.keys, *kv.values), strict=True))


def test_hidden_states_must_cover_the_slots() -> None:
    drafter = new_drafter(SpeculationMethod.EAGLE3)
    task = Sequenced(drafter, list(prompts(1, 20, 60)[0]), scattered_blocks(0)).task(k=3)
    assert task.hidden is not None
    for hidden in (None, task.hidden[1:]):
        with pytest.raises(ValueError, match="hidden states"):
            drafter.propose([replace(task, hidden=hidden)])


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(max_tokens=9, temperature=1.3),
        SamplingParams(max_tokens=9, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.3, min_tokens=4),
    ],
)
def test_a_draft_equal_to_its_target_is_always_right(params: SamplingParams) -> None:
    """Drafts are drawn with the target's parameters and clocks, so the same model draws the same tokens."""
    config = EngineConfig(TINY_TARGET, TINY_TARGET, SpeculationMethod.DRAFT_MODEL)
    drafter = load_drafter(config, target(), Sampler(2048))
    assert drafter is not None
    drafter.attach(noisy_pool(drafter))
    tokens = list(prompts(1, 20, 60)[0])
    drafts = Sequenced(drafter, tokens, scattered_blocks(0), prompt=len(tokens) - 3, params=params).propose()
    prompt, output = tokens[:-3], tokens[-3:]
    for j, draft in enumerate(drafts):
        ids = torch.tensor([[*tokens, *drafts[:j]]])
        with torch.inference_mode():
            logits = _plain_target()(ids).logits[0, -1:].float()
        row = SampleRow(params, 11, len(tokens) + j, prompt, output, drafts[:j])
        assert Sampler(2048).sample(logits, [row]).tokens == (draft,)
    assert len(drafts) == 3


def _plain_target() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32, local_files_only=True)
