"""Drafts that don't fit their target are refused in one sentence that says how and what to do."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler
from cluster.errors import ConfigError, ModelLoadError
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import (
    DraftFolder,
    SpeculationMethod,
    coupling_of,
    draft_folder,
    draft_kv_lookahead,
    has_draft_kv,
)
from cluster.speculation.protocol import Drafter
from tests.fixtures.prompts import TINY_DRAFT, TINY_EAGLE3, TINY_TARGET
from tests.unit.speculation.drafting import FOLDERS, target

DRAFT_MODEL, EAGLE3 = SpeculationMethod.DRAFT_MODEL, SpeculationMethod.EAGLE3


def load(method: SpeculationMethod, draft: Path | None) -> Drafter | None:
    return load_drafter(EngineConfig(TINY_TARGET, draft, method), target(), Sampler(target().vocab_size))


def refusal(method: SpeculationMethod, draft: Path) -> str:
    with pytest.raises(ModelLoadError) as raised:
        load(method, draft)
    message = str(raised.value)
    assert "\n" not in message and message.endswith(".")
    return message


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / folder.name))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("method", SpeculationMethod)
def test_every_method_loads_and_states_its_shape(method: SpeculationMethod) -> None:
    drafter = load(method, FOLDERS.get(method))
    if method is SpeculationMethod.NONE:
        assert drafter is None
        return
    assert drafter is not None and drafter.method is method
    layers = len(drafter.kv_layout.layers) if drafter.kv_layout else None
    assert (drafter.shape.coupling, drafter.shape.span) == (coupling_of(method), draft_kv_lookahead(method, layers))
    assert (drafter.kv_layout is not None) == has_draft_kv(method)


@pytest.mark.parametrize("method", [method for method in FOLDERS if draft_folder(method) is DraftFolder.REQUIRED])
def test_a_method_that_needs_a_draft_says_so(method: SpeculationMethod) -> None:
    with pytest.raises(ConfigError, match=f"draft is not set, but speculation method {method} needs one"):
        load(method, None)


def test_another_vocabulary_is_refused_naming_sizes_and_the_first_token_that_differs(tmp_path: Path) -> None:
    draft = copy_of(TINY_DRAFT, tmp_path)
    content = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    by_id = {token_id: token for token, token_id in vocabulary.items()}
    # An ordinary token of one byte, so that no merge is broken: the file stays a valid tokenizer.
    swapped = [i for i in sorted(by_id) if len(by_id[i]) == 1][:2]
    vocabulary[by_id[swapped[0]]], vocabulary[by_id[swapped[1]]] = swapped[1], swapped[0]
    (draft / "tokenizer.json").write_text(json.dumps(content))
    message = refusal(DRAFT_MODEL, draft)
    assert f"it has 2048 tokens, the target 2048; token {swapped[0]} is" in message
    assert "use a draft with the same tokenizer" in message


def test_without_a_tokenizer_the_sizes_decide(tmp_path: Path) -> None:
    draft = copy_of(TINY_DRAFT, tmp_path)
    (draft / "tokenizer.json").unlink()
    (draft / "tokenizer_config.json").unlink()
    assert load(DRAFT_MODEL, draft) is not None


@pytest.mark.parametrize("method", FOLDERS)
def test_a_folder_that_does_not_exist_is_refused(method: SpeculationMethod, tmp_path: Path) -> None:
    assert str(tmp_path / "nowhere") in refusal(method, tmp_path / "nowhere")


def test_a_draft_of_the_other_kind_is_refused() -> None:
    assert "tiny-eagle3" in refusal(DRAFT_MODEL, TINY_EAGLE3)
    assert "tiny-draft" in refusal(EAGLE3, TINY_DRAFT)


def test_a_head_trained_for_another_target_is_refused(tmp_path: Path) -> None:
    head = copy_of(TINY_EAGLE3, tmp_path)
    edit(head / "config.json", eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    assert "reads layer 9, but the target has 4" in refusal(EAGLE3, head)


def test_a_damaged_weight_file_is_refused(tmp_path: Path) -> None:
    for method, folder in FOLDERS.items():
        draft = copy_of(folder, tmp_path)
        (draft / "model.safetensors").write_bytes(b"\x08\x00")
        assert "model.safetensors" in refusal(method, draft)
