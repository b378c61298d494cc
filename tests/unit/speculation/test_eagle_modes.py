"""The eagle and eagle3 modes as the factory builds them: padded vocabularies, pickled folders, the log of layers."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.engine.assembly import assemble
from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler
from cluster.errors import ModelLoadError
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.protocol import Drafter
from tests.fixtures.prompts import TINY_EAGLE, TINY_EAGLE3, TINY_TARGET
from tests.unit.speculation.drafting import Sequenced, new_drafter, pool_of, prompts, scattered_blocks, target

HEADS = {SpeculationMethod.EAGLE: TINY_EAGLE, SpeculationMethod.EAGLE3: TINY_EAGLE3}
heads = pytest.mark.parametrize("method", HEADS)


def build(method: SpeculationMethod, folder: Path, allow_pickle: bool = False) -> Drafter:
    config = EngineConfig(TINY_TARGET, folder, method, allow_pickle=allow_pickle)
    drafter = load_drafter(config, target(), Sampler(target().vocab_size))
    assert drafter is not None
    pool_of(drafter)
    return drafter


def drafts_of(drafter: Drafter) -> list[tuple[int, ...]]:
    return [Sequenced(drafter, list(ids), scattered_blocks(i)).propose() for i, ids in enumerate(prompts(4, 20, 60))]


def resized(method: SpeculationMethod, vocab_size: int, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(HEADS[method], tmp_path / "resized"))
    document = json.loads((folder / "config.json").read_text())
    (document.get("transformer_layer_config") or document)["vocab_size"] = vocab_size
    (folder / "config.json").write_text(json.dumps(document))
    return folder


@heads
def test_a_vocabulary_that_is_padded_otherwise_drafts_the_same(method: SpeculationMethod, tmp_path: Path) -> None:
    padded = build(method, resized(method, 2048 + 128, tmp_path))
    assert drafts_of(padded) == drafts_of(new_drafter(method))


@heads
@pytest.mark.parametrize("size", [2047, 4096])
def test_another_vocabulary_is_refused(method: SpeculationMethod, size: int, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"vocabulary is not the target's .it has {size} tokens, the target 2048"):
        build(method, resized(method, size, tmp_path))


@heads
def test_pickled_heads_are_read_only_where_the_operator_allows_it(method: SpeculationMethod, tmp_path: Path) -> None:
    """As the official ones are: an engine with such a draft starts, and drafts are those of the same safetensors."""
    shutil.copy(HEADS[method] / "config.json", tmp_path)
    torch.save(load_file(HEADS[method] / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"speculative\.allow_pickle is not set"):
        build(method, tmp_path)
    assert drafts_of(build(method, tmp_path, allow_pickle=True)) == drafts_of(new_drafter(method))
    assert assemble(EngineConfig(TINY_TARGET, tmp_path, method, allow_pickle=True, kv_bytes=1 << 20)).drafter


def flat(**changes: Any) -> dict[str, Any]:
    """The trained head's document as all but speculators write it."""
    document = json.loads((TINY_EAGLE3 / "config.json").read_text())
    layer = document["transformer_layer_config"]
    theta = layer.pop("rope_parameters")["rope_theta"]
    return {**layer, "draft_vocab_size": document["draft_vocab_size"], "rope_theta": theta, **changes}


NESTED = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True, "use_last_layernorm": True}
# A document, and a prefix of the layer's tensors. Three states of a target of four layers are the official ones too.
LAYOUTS: dict[str, tuple[dict[str, Any], str]] = {
    "official": (flat(architectures=["LlamaForCausalLM"]), "midlayer."),
    "modelopt": (flat(architectures=["LlamaForCausalLMEagle3"], eagle_config=NESTED), "layers.0."),
    "specforge": (flat(architectures=["LlamaForCausalLMEagle3"]), "midlayer."),
    "angelslim": (flat(architectures=["Eagle3LlamaForCausalLM"], num_hidden_layers=28), "midlayer."),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_trained_head_drafts_the_same_in_every_layout(name: str, tmp_path: Path) -> None:
    document, prefix = LAYOUTS[name]
    (tmp_path / "config.json").write_text(json.dumps(document))
    tensors = load_file(TINY_EAGLE3 / "model.safetensors")
    save_file({key.replace("layers.0.", prefix): t for key, t in tensors.items()}, tmp_path / "model.safetensors")
    assert drafts_of(build(SpeculationMethod.EAGLE3, tmp_path)) == drafts_of(new_drafter(SpeculationMethod.EAGLE3))


def test_which_states_an_eagle3_head_reads_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        build(SpeculationMethod.EAGLE3, TINY_EAGLE3)
    line = "event=eagle3_head dialect=speculators counts=hidden_states hidden_layers=1,2,3 of=4"
    assert line in [record.getMessage() for record in caplog.records]
