"""Converts a GGUF file of the llama architecture into an ordinary Hugging Face model folder.

Owns: the folder and its weights: GGUF's tensor names and row order, and how a folder appears whole or not at all.
Invariant: the destination either holds a complete conversion of the given file (with a marker that says so) or is
left as it was; a reader never sees half a folder.
Called by `cluster.models.demo` for the demo target.

The weights are stored in bfloat16: half the disk and load time of float32, and a float32 run and a bfloat16 run of the
folder start from the very same numbers. They are meant to be computed with in float32 on a CPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import save_file

from cluster.errors import ModelLoadError
from cluster.models.gguf_metadata import Fields, generation_config, model_config, tokenizer, tokenizer_config

_MARKER = "conversion.json"
_CONVERTER_VERSION = 1

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, destination: Path) -> Path:
    """Converts `source` into the model folder `destination` and returns it.

    Does nothing when `destination` already holds a conversion of the same bytes by this version of the converter.
    Raises `ModelLoadError` when the file is missing, is not a llama GGUF, or has a tokenizer that is not supported.
    """
    if not source.is_file():
        raise ModelLoadError(f"GGUF file {source} does not exist; check the path or fetch the file again.")
    marker = {"source_sha256": _sha256(source), "converter_version": _CONVERTER_VERSION}
    if _read_marker(destination) == marker:
        return destination
    reader = _open(source)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        _write_folder(reader, staging)
        (staging / _MARKER).write_text(json.dumps(marker, indent=2) + "\n")
        staging.chmod(0o755)
        _replace_folder(staging, destination, marker)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return destination


def _write_folder(reader: GGUFReader, folder: Path) -> None:
    fields = Fields(reader)
    tensors = _tensors(reader, fields)
    tied = "lm_head.weight" not in tensors
    documents = {
        "config.json": model_config(fields, tied),
        "generation_config.json": generation_config(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    tokenizer(fields).save(str(folder / "tokenizer.json"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _open(source: Path) -> GGUFReader:
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError) as error:
        raise ModelLoadError(f"{source} is not a readable GGUF file ({error}); fetch the file again.") from error
    architecture = Fields(reader).get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"GGUF field general.architecture is {architecture!r} but only 'llama' can be converted;"
            " use a safetensors folder of this model instead."
        )
    return reader


def _tensors(reader: GGUFReader, fields: Fields) -> dict[str, torch.Tensor]:
    heads = int(fields.need("llama.attention.head_count"))
    kv_heads = int(fields.get("llama.attention.head_count_kv", heads))
    rotated = {"attn_q": heads, "attn_k": kv_heads}
    tensors = {}
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_freqs"):
            continue  # derived from rope_theta
        weight = dequantize(tensor.data, tensor.tensor_type)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in rotated:
            weight = _unpermute(weight, rotated[part])
        tensors[_target_name(tensor.name)] = torch.from_numpy(np.require(weight, requirements=("C", "W"))).to(
            torch.bfloat16
        )
    return tensors


def _target_name(name: str) -> str:
    if name in _TOP_LEVEL_NAMES:
        return _TOP_LEVEL_NAMES[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    raise ModelLoadError(f"GGUF tensor {name} has no place in a llama model; use a safetensors folder instead.")


def _unpermute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undoes llama.cpp's reordering of q and k rows: it rotates neighbouring pairs, transformers rotates halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _replace_folder(staging: Path, destination: Path, marker: dict[str, Any]) -> None:
    for _ in range(2):
        if destination.exists():
            retired = Path(tempfile.mkdtemp(prefix=f".{destination.name}-old-", dir=destination.parent))
            os.replace(destination, retired / destination.name)
            shutil.rmtree(retired, ignore_errors=True)
        try:
            os.rename(staging, destination)
            return
        except OSError:
            # Another process finished the same conversion between the two calls: keep whichever is complete.
            if _read_marker(destination) == marker:
                return
    raise ModelLoadError(f"Model folder {destination} could not be replaced; remove it and try again.")


def _read_marker(folder: Path) -> Any:
    try:
        return json.loads((folder / _MARKER).read_text())
    except (OSError, ValueError):
        return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
