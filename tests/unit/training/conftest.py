"""A target so small that a training of it takes a second, its greedy answers, and their captured states."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cluster.training.capture import CapturedSamples, capture
from cluster.training.samples import Sample

AUX_LAYERS = (1, 2, 3)


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,  # far from uniform, so that its answers vary
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def samples(target: LlamaForCausalLM) -> list[Sample]:
    prompts = torch.randint(3, 40, (24, 6), generator=torch.Generator().manual_seed(4))
    said = target.generate(prompts, max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    # Different lengths, so that batches are padded.
    return [Sample(tuple(row.tolist()[: 18 + i % 12]), 6) for i, row in enumerate(said)]


@pytest.fixture(scope="session")
def captured(
    target: LlamaForCausalLM, samples: list[Sample], tmp_path_factory: pytest.TempPathFactory
) -> CapturedSamples:
    return capture(target, samples, AUX_LAYERS, tmp_path_factory.mktemp("states"))


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "out" / "work"
    folder.mkdir(parents=True)
    return folder
