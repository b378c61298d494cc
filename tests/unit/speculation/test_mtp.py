"""Drafting with several MTP layers: what each layer reads, and which states of the target are kept between tasks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cluster.core.drafts import NO_DRAFTS
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.mtp import MtpDrafter
from cluster.speculation.mtp_model import MtpStack, load_mtp
from cluster.speculation.protocol import DraftTask
from cluster.speculation.span_check import measure_span
from tests.fixtures.mtp_training import new_mtp, save_mtp
from tests.fixtures.prompts import TINY_MTP, TINY_TARGET
from tests.support.plain_attention import WholeSequence
from tests.unit.speculation.drafting import (
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
from tests.unit.speculation.mtp_checkpoints import build

D = 2


def tiny(drafts: int = D) -> MtpDrafter:
    drafter = new_drafter(SpeculationMethod.MTP, drafts)
    assert isinstance(drafter, MtpDrafter)
    return drafter


def load(folder: Path) -> MtpStack:
    return load_mtp(folder, BorrowedWeights.of(target().model), torch.float32, target().num_layers)


def of_depth(layers: int, folder: Path) -> MtpDrafter:
    """A drafter of so many untrained layers, over a pool of noise."""
    save_mtp(new_mtp(target().model, layers), target().model, folder)
    drafter = MtpDrafter(load(folder), Sampler(target().vocab_size), layers)
    drafter.attach(noisy_pool(drafter))
    return drafter


def seen_late(task: DraftTask) -> DraftTask:
    """The task as the engine makes it while a request runs: the target computes the newest positions only."""
    assert task.hidden is not None
    skipped = min(D - 1, task.start)
    return replace(task, hidden_start=task.start + skipped, hidden=task.hidden[skipped:])


def test_each_layer_reads_the_layer_before_it_at_the_same_slot() -> None:
    """The drafts are those of the definition, written out without paging over all known tokens."""
    drafter, stack = tiny(), load(TINY_MTP)
    for i, ids in enumerate(prompts(5, 20, 60)):
        hidden = states(drafter, ids)
        assert hidden is not None
        known, state = list(ids), hidden[:-1]
        positions = torch.arange(len(ids) - 1)
        with torch.inference_mode():
            for k in range(D):
                tokens = torch.tensor(known[1 + k :])
                state = stack.layer(k)(tokens, state, positions, WholeSequence())
                known.append(int(stack.layer(k).logits(state[-1]).argmax()))
        assert list(Sequenced(drafter, list(ids), scattered_blocks(i)).propose(D)) == known[len(ids) :]


@pytest.mark.parametrize("layers", [1, 3])
def test_any_number_of_layers_has_as_long_a_span_and_writes_the_same_in_chunks(layers: int, tmp_path: Path) -> None:
    drafter = of_depth(layers, tmp_path)
    assert measure_span(drafter, target()) == drafter.shape.span == layers
    tokens = list(prompts(1, 35, 60)[0])
    whole = Sequenced(drafter, tokens, scattered_blocks(0)).propose(layers)
    assert len(whole) == layers
    kv = pool_of(drafter)
    sequence = Sequenced(drafter, tokens, scattered_blocks(1))
    while sequence.cursor + layers < sequence.end:
        assert drafter.propose([sequence.task(end=sequence.cursor + layers)]) == [NO_DRAFTS]
    assert sequence.propose(layers) == whole
    assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, tokens))


def test_no_more_is_drafted_than_there_are_layers() -> None:
    drafter = tiny(drafts=5)
    assert drafter.shape.max_draft_tokens == D
    assert drafter.shape.scratch == D - 1


@pytest.mark.parametrize("wanted", [0, 1])
def test_where_fewer_are_wanted_all_layers_are_written_nevertheless(wanted: int) -> None:
    drafter = tiny()
    kv = pool_of(drafter)
    tokens = list(prompts(1, 35, 60)[0])
    sequence = Sequenced(drafter, tokens, scattered_blocks(0))
    assert sequence.propose(wanted) == Sequenced(tiny(), tokens, scattered_blocks(1)).propose()[:wanted]
    assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, tokens))


@pytest.mark.parametrize("accepted", [0, 1, 2])
def test_states_that_the_next_task_lacks_were_kept(accepted: int) -> None:
    """Step by step, with the target's states of new positions only, as if all of them were given."""
    drafter = tiny()
    kv = pool_of(drafter)
    sequence = Sequenced(drafter, list(prompts(1, 20, 40)[0]), scattered_blocks(0))
    drafts = sequence.propose(D)
    for token in (9, 10, 11, 12):
        sequence.tokens += [*drafts[:accepted], token]
        drafts = drafter.propose([seen_late(sequence.task(k=D))])[0].tokens
        assert drafts == Sequenced(tiny(), sequence.tokens, scattered_blocks(1)).propose(D)
        assert_slots_equal(kv, sequence.blocks, sequence.end, expected_kv(drafter, sequence.tokens))


def test_forgotten_states_must_be_given_anew() -> None:
    """After a preemption the target computes them again; a task without them is refused before anything is written."""
    drafter = tiny()
    kv = pool_of(drafter)
    sequence = Sequenced(drafter, list(prompts(1, 20, 40)[0]), scattered_blocks(0))
    sequence.propose(D)
    drafter.forget(sequence.request_id)
    drafter.forget("never heard of")
    sequence.tokens.append(9)
    before = [tensor.clone() for tensor in (*kv.keys, *kv.values)]
    task = sequence.task(k=D)
    with pytest.raises(ValueError, match="need hidden states of all"):
        drafter.propose([seen_late(task)])
    assert all(torch.equal(a, b) for a, b in zip(before, (*kv.keys, *kv.values), strict=True))
    assert len(drafter.propose([task])[0].tokens) == D


def test_states_are_required() -> None:
    drafter = tiny()
    task = Sequenced(drafter, list(prompts(1, 20, 40)[0]), scattered_blocks(0)).task(k=D)
    with pytest.raises(ValueError, match="need the target's hidden states"):
        drafter.propose([replace(task, hidden=None)])
    with pytest.raises(ValueError, match="need the target's hidden states"):
        drafter.recompute(task.tokens, None)


@pytest.mark.parametrize("method", [SpeculationMethod.MTP, SpeculationMethod.MTP_EAGLE])
def test_layers_of_another_target_are_refused(method: SpeculationMethod, tmp_path: Path) -> None:
    config = EngineConfig(TINY_TARGET, build("mimo", tmp_path).folder, method)
    with pytest.raises(ModelLoadError, match="reads hidden states of size 32, but the target has 192: use the one"):
        load_drafter(config, target(), Sampler(target().vocab_size))


@pytest.mark.parametrize("method", [SpeculationMethod.MTP, SpeculationMethod.MTP_EAGLE])
def test_a_target_that_was_published_without_such_layers_says_so(method: SpeculationMethod) -> None:
    with pytest.raises(ModelLoadError, match="tiny-target holds no MTP layers of a known layout: use a checkpoint"):
        load_drafter(EngineConfig(TINY_TARGET, None, method), target(), Sampler(target().vocab_size))
