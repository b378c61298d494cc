"""What a model folder must hold, and what identifies it; found out without loading it.

Invariant: nothing from the folder is run or unpickled, and nothing heavy is imported, so that whoever starts a cluster
can refuse a folder before starting anything. Called by `cluster.engine` and `actors.cluster`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from cluster.errors import ModelLoadError

_SAMPLE_BYTES = 4096


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of a model folder. Raises ModelLoadError if there is none or it asks for code of its own."""
    if not path.is_dir():
        raise ModelLoadError(f"model is {path}, but must be an existing folder: give the path of a model folder.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelLoadError(f"{path} has no readable config.json: give the folder of a transformers model.") from None
    if not isinstance(config, dict) or "auto_map" in config:
        raise ModelLoadError(
            f"{path}/config.json needs Python code from its folder (auto_map), which is never run: "
            "use a model whose architecture is part of transformers."
        )
    return config


def weight_files(path: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, sorted. Raises ModelLoadError if there are none."""
    files = tuple(sorted(path.glob("*.safetensors")))
    if not files:
        other = ", but pickled weights, which are never read" if [*path.glob("*.bin"), *path.glob("*.pt*")] else ""
        raise ModelLoadError(f"{path} holds no *.safetensors file{other}: convert the weights to safetensors.")
    return files


def fingerprint(config: dict[str, Any], weights: tuple[Path, ...]) -> str:
    """Identity of a model: its configuration and, of every tensor, name, shape and a sample of its bytes.

    Sampling each tensor tells two fine-tunes of one base apart without reading all of a large checkpoint.
    """
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in weights:
        try:
            _hash_tensors(file, digest)
        except (OSError, ValueError, struct.error, KeyError, TypeError):
            raise ModelLoadError(f"{file} is not a valid safetensors file: fetch or convert it again.") from None
    return digest.hexdigest()


def _hash_tensors(file: Path, digest: Any) -> None:
    with file.open("rb") as data:
        size = struct.unpack("<Q", data.read(8))[0]
        if size > file.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = data.read(size)
        digest.update(header)
        for name, entry in sorted(json.loads(header).items()):
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            for offset in {first, max(first, last - _SAMPLE_BYTES)}:
                data.seek(8 + size + offset)
                digest.update(data.read(min(_SAMPLE_BYTES, last - offset)))
