"""Reads the tensors of a draft's checkpoint, and puts them into the module that they belong to.

Invariant: no code from a checkpoint is ever run: safetensors, or, where the operator allows it, torch's unpickler
restricted to tensors. What doesn't fit the module is refused in one sentence that names the tensor. Used by every mode
whose draft isn't a transformers model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from cluster.errors import ModelLoadError
from cluster.speculation.draft_folder import WeightFile, open_archive, weight_files_of


def read_draft_tensors(
    folder: Path, *, allow_pickle: bool = False, wanted: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    """The tensors of a checkpoint by their names there, on the CPU; only those whose name is `wanted` are read.

    Shards without a wanted tensor aren't opened, so that a few tensors of a large model cost little. Raises
    ModelLoadError for files that are missing, damaged, or pickled without `allow_pickle`.
    """
    tensors: dict[str, Tensor] = {}
    for file in weight_files_of(folder, allow_pickle):
        if file.tensors is not None and not any(wanted(name) for name in file.tensors):
            continue
        for name, tensor in _unpickle(file, wanted) if file.pickled else _read_safetensors(file, wanted):
            if name in tensors:
                raise ModelLoadError(f"{folder} holds tensor {name} twice: leave one set of weights in it.")
            tensors[name] = tensor
    return tensors


def draft_tensor_names(folder: Path) -> list[str]:
    """The names of all tensors of a checkpoint in safetensors. Raises ModelLoadError for files that can't be read."""
    names: list[str] = []

    def note(name: str) -> bool:
        names.append(name)
        return False

    read_draft_tensors(folder, wanted=note)
    return names


def fill(module: nn.Module, tensors: Mapping[str, Tensor], what: str, folder: Path) -> None:
    """Make `tensors` the parameters and buffers of `module` that have their names; nothing is copied.

    Floats keep the type that they have in the checkpoint. `module` may be on the meta device, so that it need not be
    initialised first. Raises ModelLoadError for a tensor that is absent, left over, of another shape, or a float where
    the module has integers or the other way round. `what` names the kind of draft, such as "EAGLE3 head".
    """
    own = module.state_dict()
    lacking = sorted(own.keys() - tensors.keys())
    if lacking:
        raise ModelLoadError(f"The {what} in {folder} lacks tensor {_some(lacking)}: use a complete checkpoint.")
    left_over = sorted(tensors.keys() - own.keys())
    if left_over:
        raise ModelLoadError(
            f"The {what} in {folder} has tensor {_some(left_over)}, which its config.json gives no place: "
            "use a checkpoint whose config.json belongs to it."
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ModelLoadError(
                f"Tensor {name} of the {what} in {folder} has shape {tuple(tensor.shape)}, but config.json asks for "
                f"{tuple(own[name].shape)}: use a checkpoint whose config.json belongs to it."
            )
        if _kind(tensor) != _kind(own[name]):
            raise ModelLoadError(
                f"Tensor {name} of the {what} in {folder} is of type {_dtype(tensor)}, but must be {_kind(own[name])}: "
                "quantised drafts are not supported, use the original checkpoint."
            )
    taken = {name: t if t.is_floating_point() else t.to(own[name].dtype) for name, t in tensors.items()}
    module.load_state_dict(taken, assign=True)


def _read_safetensors(file: WeightFile, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file.path, framework="pt") as opened:
            names = list(opened.keys())
            _check_present(file, names, wanted)
            for name in names:
                if wanted(name):
                    yield name, opened.get_tensor(name)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(
            f"{file.path} is not a readable safetensors file ({_reason(error)}): fetch it again."
        ) from None


def _unpickle(file: WeightFile, wanted: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    open_archive(file.path).close()
    try:
        content: Any = torch.load(file.path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises whatever the file makes it stumble over
        raise ModelLoadError(
            f"{file.path} can't be read as tensors only ({_reason(error)}): convert it to safetensors if you trust it."
        ) from None
    if not isinstance(content, dict) or not all(_is_plain(tensor) for tensor in content.values()):
        raise ModelLoadError(f"{file.path} holds something else than tensors by name: convert it to safetensors.")
    _check_present(file, content, wanted)
    for name, tensor in content.items():
        if wanted(name):
            yield name, tensor.detach()


def _check_present(file: WeightFile, names: Collection[str], wanted: Callable[[str], bool]) -> None:
    absent = sorted(name for name in (file.tensors or ()) if wanted(name) and name not in names)
    if absent:
        raise ModelLoadError(f"{file.path} lacks tensor {_some(absent)}, which the index names: fetch it again.")


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized and not value.is_meta


def _kind(tensor: Tensor) -> str:
    """What may stand in for each other without loss of meaning."""
    if tensor.dtype is torch.bool:
        return "bool"
    # One byte a number is a quantised weight, which means nothing without its scales.
    if tensor.is_floating_point() and tensor.dtype.itemsize > 1:
        return "a float of 16 bits or more"
    return "an integer" if tensor.dtype in (torch.int32, torch.int64) else _dtype(tensor)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")
