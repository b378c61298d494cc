"""EAGLE3 heads against code of others: speculators' Eagle3DraftModel has the same logits for the same checkpoint.

Runs in speculators' own environment (`make peers`), and is skipped without it.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cluster.engine.attention import GatherSdpa
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvTensors
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.recompute import recompute_model
from cluster.training.ttt import TttBatch, ttt_steps
from tests.fixtures.prompts import TINY_EAGLE3
from tests.unit.speculation.drafting import prompts, target
from tests.unit.speculation.eagle3_checkpoints import CONFIG, DOCUMENT, LAYER, borrowed, load, random_head

ROOT = Path(__file__).parents[3]
PEER = ROOT / ".peers" / "speculators" / "bin" / "python"
SCRIPT = ROOT / "cluster" / "bench" / "peer_scripts" / "speculators_eagle3.py"
STEPS = 3
ROWS = 40
# Of the largest logit: what float32 leaves after a layer in another order of sums.
CLOSE = 4e-6
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 16,
}
# What differs from the plain head: in the document, in its layers, and in our configuration.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "norm before the residual, llama3 positions": (
        {"norm_before_residual": True},
        {"rope_parameters": LLAMA3},
        {"norm_before_residual": True},
    ),
    "states normed one by one, outputs fed back normed": (
        {"fc_norm": True, "norm_output": True},
        {},
        {"fc_norm": True, "norm_output": True},
    ),
    "states normed together, qwen3 layers": (
        {"norm_before_fc": True},
        {"model_type": "qwen3"},
        {"norm_before_fc": True},
    ),
    "three layers with biases": ({}, {"num_hidden_layers": 3, "attention_bias": True}, {}),
    "two layers, the second with a window": (
        {},
        {
            "model_type": "qwen3",
            "num_hidden_layers": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
        {},
    ),
}


def write_variant(name: str, folder: Path) -> None:
    """A random head of the variant, with random states for it."""
    document, layer, config = VARIANTS[name]
    plain = DOCUMENT["transformer_layer_config"]
    assert isinstance(plain, dict)
    layers = int(layer.get("num_hidden_layers", 1))
    shape = replace(
        LAYER,
        qk_norm=layer.get("model_type") == "qwen3",
        windows=(None,) * layers,
        qkv_bias="attention_bias" in layer,
        output_bias="attention_bias" in layer,
    )
    head = random_head(replace(CONFIG, layer=shape, **config))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DOCUMENT | document | {"transformer_layer_config": plain | layer}))
    own = {"embed_tokens.weight": borrowed().embedding}
    t2d = {"t2d": torch.zeros(60, dtype=torch.bool).index_fill_(0, head.target_ids, True)}
    save_file(head.state_dict() | own | t2d, folder / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    given = {
        "tokens": torch.randint(0, 60, (ROWS + 1,), generator=generator),
        "states": torch.randn(ROWS, 96, generator=generator),
    }
    save_file(given, folder / "input.safetensors")


def write_trained(folder: Path) -> None:
    """The trained tiny head with the target's own states."""
    shutil.copytree(TINY_EAGLE3, folder)
    tokens = prompts(1, ROWS + 1, 60)[0]
    states = recompute_model(target(), tokens, (1, 2, 3))[1]
    assert states is not None
    given = {"tokens": torch.tensor(tokens), "states": states[:-1].contiguous()}
    save_file(
        given | {"embedding": BorrowedWeights.of(target().model).embedding.contiguous()}, folder / "input.safetensors"
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """For each head a folder with the checkpoint, what is fed to it, and what speculators makes of it."""
    if not PEER.exists():
        pytest.skip(f"{PEER} doesn't exist: `make peers` installs speculators")
    base = tmp_path_factory.mktemp("heads")
    made = {name: base / str(i) for i, name in enumerate(["trained", *VARIANTS])}
    for name, folder in made.items():
        write_trained(folder) if name == "trained" else write_variant(name, folder)
    command = [str(PEER), str(SCRIPT), str(STEPS), *map(str, made.values())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return made


def paged_logits(head: Eagle3Head, given: Mapping[str, Tensor]) -> Tensor:
    """The first step as it is served: through a pool of blocks."""
    kv = KvTensors(head.kv_layout, num_blocks=16, block_size=8, device=torch.device("cpu"))
    batch = pack([PagedRow(given["tokens"][1:].tolist(), 0, tuple(reversed(range(16))))], kv)
    states = head.combine(given["states"])
    return head.logits(head(batch.input_ids[0], states, batch.positions[0], GatherSdpa().plan(batch, kv)))


def chain_logits(head: Eagle3Head, given: Mapping[str, Tensor]) -> list[Tensor]:
    """All steps, each fed the outputs of the one before; step k of a chain that began at row i lies at row i."""
    tokens, states = given["tokens"][None, 1:], given["states"][None]
    batch = TttBatch(tokens, states, tokens, states, torch.ones_like(tokens, dtype=torch.bool))
    return [head.logits(feedback[0, k:]) for k, feedback in enumerate(ttt_steps(head, batch, STEPS))]


@pytest.mark.parametrize("name", ["trained", *VARIANTS])
def test_speculators_has_the_same_logits(name: str, folders: Mapping[str, Path]) -> None:
    folder = folders[name]
    given, theirs = load_file(folder / "input.safetensors"), load_file(folder / "output.safetensors")
    own = BorrowedWeights.of(target().model)
    head = Eagle3Head.load(folder, own, torch.float32) if name == "trained" else load(folder)
    compared = [(paged_logits(head, given), theirs["logits.0"])]
    if not any(head.config.layer.windows):  # training knows no windows
        rows = len(given["states"])
        compared += [(ours, theirs[f"logits.{k}"][: rows - k]) for k, ours in enumerate(chain_logits(head, given))]
    difference = max(float((ours - other).abs().max()) for ours, other in compared)
    largest = max(float(other.abs().max()) for _, other in compared)
    print(f"{name}: largest difference {difference:.1e}, largest logit {largest:.1f}")
    assert difference <= CLOSE * max(1.0, largest)
