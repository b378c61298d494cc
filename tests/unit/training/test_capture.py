"""Captured states are the target's own, survive a second call, and follow the text when it changes."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from cluster.training import capture as capture_module
from cluster.training.capture import CapturedSamples, capture
from cluster.training.samples import Sample
from tests.unit.training.conftest import AUX_LAYERS


def test_states_are_those_of_each_sample_alone(
    target: LlamaForCausalLM, samples: list[Sample], captured: CapturedSamples
) -> None:
    assert len(captured) == len(samples)
    for i in (0, 5, 23):
        alone = target.model(torch.tensor([samples[i].tokens]), output_hidden_states=True)
        aux = torch.cat([alone.hidden_states[layer][0] for layer in AUX_LAYERS], dim=-1)
        assert captured[i].tokens.tolist() == list(samples[i].tokens)
        torch.testing.assert_close(captured[i].aux, aux, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(captured[i].last, alone.last_hidden_state[0], rtol=1e-4, atol=1e-5)


def test_only_what_is_new_is_captured(
    target: LlamaForCausalLM, samples: list[Sample], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_module, "SHARD_SAMPLES", 8)
    capture(target, samples[:20], AUX_LAYERS, tmp_path)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert len(before) == 3
    whole = capture(target, samples, AUX_LAYERS, tmp_path)
    after = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert len(whole) == len(samples)
    assert [name for name in before if before[name] != after[name]] == ["shard-00002.safetensors"]
    changed = capture(target, samples[1:], AUX_LAYERS, tmp_path)
    assert changed[0].tokens.tolist() == list(samples[1].tokens)
