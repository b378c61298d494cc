"""Reading checkpoints: sharded, pickled, damaged and hostile ones; and what is refused on the way into a module."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from cluster.errors import ModelLoadError
from cluster.speculation.draft_tensors import fill, read_draft_tensors


def sentence(error: BaseException) -> str:
    message = str(error)
    assert "\n" not in message and message.endswith(".")
    return message


def refused(folder: Path, allow_pickle: bool = False) -> str:
    with pytest.raises(ModelLoadError) as raised:
        read_draft_tensors(folder, allow_pickle=allow_pickle)
    return sentence(raised.value)


def write_shards(folder: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "model-1.safetensors")
    save_file({"c": torch.full((1,), 5.0)}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_as_one(tmp_path: Path) -> None:
    write_shards(tmp_path)
    tensors = read_draft_tensors(tmp_path)
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"a": [1, 1], "b": [0, 0, 0], "c": [5]}


def test_only_wanted_tensors_are_read_and_only_their_shards_opened(tmp_path: Path) -> None:
    write_shards(tmp_path)
    (tmp_path / "model-1.safetensors").write_bytes(b"damaged")
    assert list(read_draft_tensors(tmp_path, wanted=lambda name: name == "c")) == ["c"]


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"a": torch.ones(2)}, tmp_path / "model-1.safetensors")
    assert "model-1.safetensors lacks tensor b, which the index names" in refused(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"a": torch.ones(2)}, tmp_path / name)
    assert "holds tensor a twice" in refused(tmp_path)


def header(content: object, size: int | None = None) -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text) if size is None else size) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x00",
        header({}, size=1 << 62),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}),  # and no data
        header({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 8]}}) + bytes(8),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}) + bytes(8),
        header({"a": {"dtype": "NOPE", "shape": [2], "data_offsets": [0, 8]}}) + bytes(8),
        header([1, 2]),
        struct.pack("<Q", 9) + b"not json!",
    ],
)
def test_damaged_safetensors_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "model.safetensors is not a readable safetensors file" in refused(tmp_path)


def test_pickled_tensors_are_read_where_they_are_allowed(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(2, dtype=torch.float16), "d2t": torch.arange(3), "p": nn.Parameter(torch.ones(1))}
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    read = read_draft_tensors(tmp_path, allow_pickle=True)
    assert all(torch.equal(read[name], tensor) and not read[name].requires_grad for name, tensor in tensors.items())
    assert "speculative.allow_pickle" in refused(tmp_path)


class Hostile:
    """Runs code when it is unpickled without restriction."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return exec, (f"open({str(self.mark)!r}, 'w')",)


def test_a_pickle_with_code_is_refused_without_running_it(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Hostile(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    assert "can't be read as tensors only" in refused(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[torch.ones(1)], {"model": {"a": torch.ones(1)}}, {"a": 1}])
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "pytorch_model.bin")
    assert "something else than tensors by name" in refused(tmp_path, allow_pickle=True)


def test_a_torn_pickle_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(4096)}, path)
    path.write_bytes(path.read_bytes()[:-500])
    assert "no whole file as torch.save writes it" in refused(tmp_path, allow_pickle=True)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2, 3))
        self.register_buffer("ids", torch.zeros(4, dtype=torch.int64))


def given() -> dict[str, torch.Tensor]:
    return {"weight": torch.ones(2, 3, dtype=torch.bfloat16), "ids": torch.arange(4)}


def test_a_module_takes_what_fits_it(tmp_path: Path) -> None:
    module = Small()
    fill(module, given(), "head", tmp_path)
    assert module.weight.tolist() == [[1, 1, 1]] * 2 and module.ids.tolist() == [0, 1, 2, 3]
    with torch.device("meta"):
        unbuilt = Small()
    fill(unbuilt, given(), "head", tmp_path)
    assert unbuilt.weight.tolist() == [[1, 1, 1]] * 2 and unbuilt.ids.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": None}, "lacks tensor ids"),
        ({"more": torch.ones(1)}, "has tensor more, which its config.json gives no place"),
        ({"weight": torch.ones(3, 2)}, r"weight .* has shape \(3, 2\), but config.json asks for \(2, 3\)"),
        ({"weight": torch.ones(2, 3, dtype=torch.int8)}, "weight .* is of type int8, but must be a float"),
        ({"weight": torch.ones(2, 3).to(torch.float8_e4m3fn)}, "weight .* is of type float8_e4m3fn"),
        ({"ids": torch.ones(4)}, "ids .* is of type float32, but must be an integer"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in (given() | change).items() if tensor is not None}
    with pytest.raises(ModelLoadError, match=message) as raised:
        fill(Small(), tensors, "EAGLE3 head", tmp_path)
    assert str(tmp_path) in sentence(raised.value)
