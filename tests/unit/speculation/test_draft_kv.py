"""Draft KV: what a drafter writes equals a fresh computation, however the work was cut, packed, reused or rejected."""

from dataclasses import replace
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.core.drafts import NO_DRAFTS
from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler, SampleRow
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from tests.fixtures.prompts import TINY_DRAFT, TINY_EAGLE3, TINY_TARGET
from tests.support.plain_attention import WholeSequence
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
    states,
    target,
)

HOT = SamplingParams(max_tokens=9, temperature=2.5)
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
        assert drafter.propose([sequence.task(end=sequence.cursor + chunk)]) == [NO_DRAFTS]
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
    alone = [sequence.propose(k) for sequence, k in zip(sequences(), wanted, strict=True)]
    assert [drafts.tokens for drafts in packed] == alone
    assert [len(drafts) for drafts in packed] == [min(k, drafter.shape.max_draft_tokens) for k in wanted]


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


def drawn(logits: torch.Tensor, position: int) -> int:
    """The token that `Sequenced` draws at `position` with HOT."""
    token = Sampler(2048).sample(logits.float(), [SampleRow(HOT, 11, position)]).tokens[0]
    assert token is not None
    return token


@methods
def test_reused_slots_are_read(method: SpeculationMethod) -> None:
    """A request that starts at the depth of a shared prefix drafts as if it had computed everything itself."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    first, second = (list(ids) for ids in prompts(2, 40, 60))
    shared = 3 * BLOCK_SIZE
    known = shared + max(1, drafter.shape.span or 0)  # what the shared slots were made of
    second[:known] = first[:known]
    writer = Sequenced(drafter, first, scattered_blocks(0))
    writer.propose()
    # The claim went a few tokens less deep than the shared blocks: those are recomputed, into the trash block.
    reader = Sequenced(drafter, second, writer.blocks[:3] + scattered_blocks(1), cursor=shared - 5, held=shared)
    drafts = reader.propose()
    assert_slots_equal(kv, reader.blocks, reader.end, expected_kv(drafter, second))
    assert drafts == Sequenced(drafter, second, scattered_blocks(2)).propose()


@methods
def test_held_slots_are_never_written(method: SpeculationMethod) -> None:
    """Not even with what they already hold: here they hold noise, and keep it."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    held = scattered_blocks(0)[:3]
    before = [tensor[list(held)].clone() for tensor in (*kv.keys, *kv.values)]
    tokens = list(prompts(1, 40, 60)[0])
    Sequenced(drafter, tokens, scattered_blocks(0), cursor=3 * BLOCK_SIZE - 5, held=3 * BLOCK_SIZE).propose()
    after = [tensor[list(held)] for tensor in (*kv.keys, *kv.values)]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


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
        # A block of masks that see each other drafts as a whole or not at all.
        fits = drafter.shape.scratch is None or room >= drafter.shape.scratch
        assert Sequenced(drafter, tokens, scattered_blocks(1)).propose() == (free[:count] if fits else ())


@methods
def test_nothing_is_written_or_drafted_past_the_drafts_last_position(method: SpeculationMethod) -> None:
    """The target goes on alone, and the slots that the draft can't hold keep what they had."""
    drafter = new_drafter(method)
    kv = pool_of(drafter)
    tokens = list(prompts(1, 40, 60)[0])
    drafter.shape = replace(drafter.shape, max_positions=20)
    sequence = Sequenced(drafter, tokens, scattered_blocks(0))
    before = kv.read(0, sequence.blocks, 60)[0]
    assert drafter.propose([sequence.task(end=15)]) == [NO_DRAFTS]
    assert sequence.propose() == ()
    assert_slots_equal(kv, sequence.blocks, 20, expected_kv(drafter, tokens))
    assert torch.equal(kv.read(0, sequence.blocks, 60)[0][20:], before[20:])
    sequence.tokens += [7, 8]
    assert sequence.propose() == ()


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


def test_a_draft_model_drafts_its_own_continuation() -> None:
    """As transformers computes its logits, without a cache. Drawn hot, so that a small error in them shows."""
    drafter = new_drafter(SpeculationMethod.DRAFT_MODEL, drafts=4)
    plain = AutoModelForCausalLM.from_pretrained(TINY_DRAFT, dtype=torch.float32, local_files_only=True)
    for i, ids in enumerate(prompts(5, 20, 60)):
        known = list(ids)
        with torch.inference_mode():
            for _ in range(4):
                known.append(drawn(plain(torch.tensor([known])).logits[0, -1:], len(known)))
        drafts = Sequenced(drafter, list(ids), scattered_blocks(i), params=HOT).propose(4)
        assert list(drafts) == known[len(ids) :]


def test_an_eagle3_head_feeds_its_own_output_back() -> None:
    """The chain equals one written out without paging: real pairs, then pairs of (last output, last draft)."""
    drafter = new_drafter(SpeculationMethod.EAGLE3, drafts=4)
    head = Eagle3Head.load(TINY_EAGLE3, BorrowedWeights.of(target().model), torch.float32)
    for i, ids in enumerate(prompts(5, 20, 60)):
        aux = states(drafter, ids)
        assert aux is not None
        known = list(ids)
        with torch.inference_mode():
            hidden = head.combine(aux[:-1])
            for _ in range(4):
                output = head(torch.tensor(known[1:]), hidden, torch.arange(len(known) - 1), WholeSequence())
                logits = torch.full((1, 2048), -torch.inf)
                logits[:, head.target_ids] = head.logits(output[-1:])
                known.append(drawn(logits, len(known)))
                hidden = torch.cat([hidden, output[-1:]])
        drafts = Sequenced(drafter, list(ids), scattered_blocks(i), params=HOT).propose(4)
        assert list(drafts) == known[len(ids) :]


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
        HOT,
        SamplingParams(max_tokens=9, temperature=2.0, top_k=40, top_p=0.9, repetition_penalty=1.3, min_tokens=4),
        SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0),
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
    plain = AutoModelForCausalLM.from_pretrained(TINY_TARGET, dtype=torch.float32, local_files_only=True)
    for j, draft in enumerate(drafts):
        ids = torch.tensor([[*tokens, *drafts[:j]]])
        with torch.inference_mode():
            logits = plain(ids).logits[0, -1:].float()
        row = SampleRow(params, 11, len(tokens) + j, prompt, output, drafts[:j])
        assert Sampler(2048).sample(logits, [row]).tokens == (draft,)
    assert len(drafts) == 3
