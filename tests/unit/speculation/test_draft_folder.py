"""Which files of a draft's folder are its weights, and what is refused before any of them is opened."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cluster.errors import ModelLoadError
from cluster.speculation.draft_folder import check_architecture, draft_fingerprint, read_draft_config, weight_files_of


def refusal_of(folder: Path, allow_pickle: bool = False) -> str:
    with pytest.raises(ModelLoadError) as raised:
        weight_files_of(folder, allow_pickle)
    message = str(raised.value)
    assert "\n" not in message and message.endswith(".")
    return message


def index(folder: Path, weight_map: object, name: str = "model.safetensors.index.json") -> None:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))


def test_the_models_own_file_is_preferred_to_others(tmp_path: Path) -> None:
    for name in ("consolidated.safetensors", "model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).touch()
    assert [file.path.name for file in weight_files_of(tmp_path, allow_pickle=True)] == ["model.safetensors"]


def test_an_index_tells_the_shards_apart(tmp_path: Path) -> None:
    for shard in ("a.safetensors", "b.safetensors"):
        (tmp_path / shard).touch()
    index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    assert {file.path.name: file.tensors for file in weight_files_of(tmp_path)} == {
        "a.safetensors": {"y"},
        "b.safetensors": {"x", "z"},
    }


def test_pickles_are_named_only_where_they_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    assert "pickled weights only (pytorch_model.bin), and speculative.allow_pickle is not set" in refusal_of(tmp_path)
    assert weight_files_of(tmp_path, allow_pickle=True)[0].pickled


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "training_args.bin").touch()
    assert "holds no weights" in refusal_of(tmp_path, allow_pickle=True)


@pytest.mark.parametrize(
    "shard",
    ["../outside.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "..\\x.safetensors", "..", "", "model.bin"],
)
def test_an_index_cannot_name_a_file_elsewhere(tmp_path: Path, shard: str) -> None:
    (tmp_path / "outside.safetensors").touch()
    (tmp_path / "draft").mkdir()
    index(tmp_path / "draft", {"x": shard})
    assert f"names the file {shard!r}, but shards are *.safetensors files beside it" in refusal_of(tmp_path / "draft")


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    index(tmp_path, {"x": "model-00002-of-00002.safetensors"})
    assert "names model-00002-of-00002.safetensors, which is missing" in refusal_of(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"x": 3}}', "[" * 100_000])
def test_a_damaged_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal_of(tmp_path)


@pytest.mark.parametrize("content", [None, "{", "[1]", "[" * 100_000])
def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json .*[^\n]\.$"):
        read_draft_config(tmp_path)


def test_an_unknown_architecture_is_refused_and_its_code_never_run(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Theirs"], "auto_map": {"AutoModel": "theirs.Theirs"}})
    )
    with pytest.raises(ModelLoadError, match=r"\['Theirs'\], and needs Python code from its folder \(auto_map\)"):
        check_architecture(tmp_path, read_draft_config(tmp_path), "EAGLE3 head", ("Known",))
    assert not (tmp_path / "ran").exists()
    assert check_architecture(tmp_path, {"architectures": ["Known"]}, "EAGLE3 head", ("Known",)) == "Known"


@pytest.mark.parametrize("pickled", [False, True])
def test_the_fingerprint_tells_weights_and_configurations_apart(tmp_path: Path, pickled: bool) -> None:
    def identity(weight: float, layers: int) -> str:
        tensors = {"w": torch.full((3,), weight)}
        (tmp_path / "config.json").write_text(json.dumps({"layers": layers}))
        if pickled:
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        else:
            save_file(tensors, tmp_path / "model.safetensors")
        return draft_fingerprint(tmp_path, allow_pickle=pickled)

    assert identity(1.0, 1) == identity(1.0, 1)
    assert len({identity(1.0, 1), identity(2.0, 1), identity(1.0, 2)}) == 3
