"""DFlash and P-EAGLE drafts against code of others: speculators' models have the same logits for the same checkpoint.

Runs in speculators' own environment (`make peers`), and is skipped without it.
"""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler
from cluster.speculation.dflash import DFlashDrafter
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.peagle import PEagleDrafter
from tests.fixtures.prompts import TINY_DFLASH, TINY_PEAGLE, TINY_TARGET
from tests.unit.speculation.drafting import Sequenced, pool_of, prompts, scattered_blocks, states, target

ROOT = Path(__file__).parents[3]
PEER = ROOT / ".peers" / "speculators" / "bin" / "python"
SCRIPT = ROOT / "cluster" / "bench" / "peer_scripts" / "speculators_parallel.py"
ROWS, BLOCK = 40, 4
# Of the largest logit: what float32 leaves after two layers in another order of sums.
CLOSE = 4e-6
SLIDING = {
    "layer_types": ["full_attention", "sliding_attention"],
    "use_sliding_window": True,
    # Wider than the sequence: speculators counts a window from the anchor, engines from each query.
    "sliding_window": 512,
}
DFLASH: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dflash": ({}, {}),
    "dflash, from the anchor": ({"sample_from_anchor": True}, {}),
    "dflash, a layer with a window": ({"sliding_window_non_causal": True}, SLIDING),
    "dflash, a layer with a window and a causal block": ({"sliding_window_non_causal": False}, SLIDING),
}
PEAGLE: dict[str, dict[str, Any]] = {
    "peagle": {},
    "peagle, norm before the residual": {"norm_before_residual": True},
    "peagle, outputs normed": {"norm_output": True},
}


def write(name: str, folder: Path) -> None:
    """The trained tiny draft, changed as `name` says, with a prompt and its target's states."""
    source = TINY_PEAGLE if name in PEAGLE else TINY_DFLASH
    shutil.copytree(source, folder)
    document = json.loads((source / "config.json").read_text())
    if name in PEAGLE:
        document |= PEAGLE[name]
    else:
        changes, layers = DFLASH[name]
        document = {
            "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "draft_vocab_size": 2048,
            "block_size": BLOCK, "mask_token_id": 5, "aux_hidden_state_layer_ids": [1, 2, 3],
            "transformer_layer_config": document | layers,
        } | changes  # fmt: skip
    (folder / "config.json").write_text(json.dumps(document))
    tokens = prompts(1, ROWS, 60)[0]
    model = target().model
    aux = states(drafter_of(folder, name), tokens)
    assert aux is not None
    given = {
        "tokens": torch.tensor(tokens),
        "states": aux[:-1].contiguous(),
        "embedding": model.get_input_embeddings().weight.clone(memory_format=torch.contiguous_format),
        "output": model.get_output_embeddings().weight.clone(memory_format=torch.contiguous_format),
    }
    save_file(given, folder / "input.safetensors")


def drafter_of(folder: Path, name: str) -> DFlashDrafter | PEagleDrafter:
    method = SpeculationMethod.PEAGLE if name in PEAGLE else SpeculationMethod.DFLASH
    drafter = load_drafter(EngineConfig(TINY_TARGET, folder, method, num_speculative_tokens=4), target(), Sampler(2048))
    assert isinstance(drafter, DFlashDrafter | PEagleDrafter)
    return drafter


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """For each draft a folder with the checkpoint, what is fed to it, and what speculators makes of it."""
    if not PEER.exists():
        pytest.skip(f"{PEER} doesn't exist: `make peers` installs speculators")
    base = tmp_path_factory.mktemp("drafts")
    made = {name: base / str(i) for i, name in enumerate([*DFLASH, *PEAGLE])}
    for name, folder in made.items():
        write(name, folder)
    command = [str(PEER), str(SCRIPT), *map(str, made.values())]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return made


@pytest.mark.parametrize("name", [*DFLASH, *PEAGLE])
def test_speculators_has_the_same_logits(
    name: str, folders: Mapping[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are served: through a pool of scattered blocks, in one pass."""
    folder = folders[name]
    drafter = drafter_of(folder, name)
    pool_of(drafter)
    seen: list[torch.Tensor] = []
    original = drafter.head.logits

    def recorded(output: torch.Tensor) -> torch.Tensor:
        seen.append(original(output))
        return seen[-1]

    monkeypatch.setattr(drafter.head, "logits", recorded)
    tokens = load_file(folder / "input.safetensors")["tokens"].tolist()
    drafts = Sequenced(drafter, tokens, scattered_blocks(0)).propose(drafter.shape.max_draft_tokens)
    theirs = load_file(folder / "output.safetensors")["logits"][-len(drafts) :]
    largest = float(theirs.abs().max())
    difference = float((seen[0] - theirs).abs().max())
    print(f"{name}: largest difference {difference:.1e}, largest logit {largest:.1f}")
    assert len(drafts) >= 3 and drafts == tuple(theirs.argmax(-1).tolist())
    assert difference <= CLOSE * max(1.0, largest)
