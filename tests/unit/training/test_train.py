"""Training end to end on a target of a few thousand weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from cluster.errors import ConfigError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.training.capture import CapturedSamples, capture
from cluster.training.checkpoint import TrainingState
from cluster.training.evaluate import Acceptance, measure_acceptance
from cluster.training.export import export_head
from cluster.training.head_init import choose_vocabulary, head_config, new_head
from cluster.training.options import TrainDraftOptions
from cluster.training.samples import Sample
from cluster.training.trainer import Trainer
from tests.fixtures.eagle_training import new_eagle_head
from tests.unit.training.conftest import AUX_LAYERS


def trainer(
    target: LlamaForCausalLM, captured: CapturedSamples, samples: list[Sample], work: Path, passes: int
) -> tuple[Trainer, Eagle3Head]:
    options = TrainDraftOptions(
        model=Path("unused"),
        out=work.parent,
        work_dir=work,
        token_passes=passes,
        batch_tokens=128,
        max_len=64,
        learning_rate=3e-3,
        evaluate_every=1500,
    )
    vocabulary, _ = choose_vocabulary(samples, 32, 40)
    head = new_head(target, head_config(target, 32, AUX_LAYERS), vocabulary, seed=0)
    return Trainer(head, captured, captured, BorrowedWeights.of(target).output, options, torch.float32), head


def losses_of(trained: Trainer) -> list[float]:
    losses: list[float] = []

    def report(state: TrainingState, acceptance: Acceptance | None) -> None:
        assert state.loss is not None
        losses.append(state.loss)

    trained.run(report)
    return losses


def test_training_lowers_the_loss_and_raises_acceptance(
    target: LlamaForCausalLM, captured: CapturedSamples, samples: list[Sample], work: Path
) -> None:
    training, head = trainer(target, captured, samples, work, passes=12_000)
    before = measure_acceptance(head, captured, 3)
    losses = losses_of(training)
    after = measure_acceptance(head, captured, 3)
    assert losses[-1] < 0.8 * losses[0]
    assert after.length > before.length + 0.1
    curve = [json.loads(line) for line in (work / "curve.jsonl").read_text().splitlines()]
    assert [line["passes"] for line in curve] == sorted(line["passes"] for line in curve)
    assert curve[-1]["acceptance"] == pytest.approx(after.length, abs=1e-4)


class Interrupted(Exception):
    pass


def test_a_resumed_training_is_the_uninterrupted_one(
    target: LlamaForCausalLM, captured: CapturedSamples, samples: list[Sample], tmp_path: Path
) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    whole.mkdir()
    resumed.mkdir()
    training, expected = trainer(target, captured, samples, whole, passes=5000)
    losses_of(training)

    def interrupt(state: TrainingState, acceptance: Acceptance | None) -> None:
        if state.passes > 2500:
            raise Interrupted

    training, _ = trainer(target, captured, samples, resumed, passes=5000)
    with pytest.raises(Interrupted):
        training.run(interrupt)
    training, head = trainer(target, captured, samples, resumed, passes=5000)
    losses_of(training)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(head.state_dict()[name], tensor), name


def test_the_exported_head_loads_and_drafts_the_same(
    target: LlamaForCausalLM, captured: CapturedSamples, samples: list[Sample], work: Path
) -> None:
    training, head = trainer(target, captured, samples, work, passes=3000)
    losses_of(training)
    export_head(head, work.parent, target.config, 3, torch.float32)
    loaded = Eagle3Head.load(work.parent, BorrowedWeights.of(target), torch.float32)
    assert loaded.hidden_layers == AUX_LAYERS
    assert measure_acceptance(loaded, captured, 3) == measure_acceptance(head, captured, 3)
    t2d = load_file(work.parent / "model.safetensors")["t2d"]
    assert t2d.nonzero().flatten().tolist() == loaded.target_ids.tolist()


def test_a_head_over_the_last_state_and_the_whole_vocabulary_is_trained_too(
    target: LlamaForCausalLM, samples: list[Sample], work: Path
) -> None:
    head = new_eagle_head(target)
    data = capture(target, samples, head.hidden_layers, work / "states")
    options = TrainDraftOptions(
        model=Path("unused"), out=work.parent, work_dir=work, token_passes=16_000, batch_tokens=128, max_len=64
    )
    before = measure_acceptance(head, data, 3)
    losses_of(Trainer(head, data, data, BorrowedWeights.of(target).output, options, torch.float32))
    assert measure_acceptance(head, data, 3).length > before.length + 0.1


def test_the_vocabulary_is_made_of_what_answers_use() -> None:
    samples = [Sample((9, 9, 9, 5, 5, 7), 3), Sample((8, 5, 7, 2), 1)]
    chosen, coverage = choose_vocabulary(samples, 2, 10)
    assert chosen == [5, 7]
    assert coverage == pytest.approx(5 / 6)
    assert choose_vocabulary(samples, 5, 10)[0] == [0, 1, 2, 5, 7]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokens": 0}, "tokens is 0"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"batch_tokens": 9}, "batch_tokens is 9"),
    ],
)
def test_impossible_options_are_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainDraftOptions(model=Path("m"), out=Path("o"), **changed)  # type: ignore[arg-type]
