"""What the folder of a draft holds: its `config.json`, and which of its files hold its weights.

Invariant: nothing is loaded, run or unpickled here, and every file named lies in the folder itself. Pickled weights
(`*.bin`, `*.pt`), the only form of some official drafts, are named only where the operator allows them. Called by
whoever starts a cluster, by the engine for the draft's identity, and by `cluster.speculation.draft_tensors`.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from cluster.engine.model_folder import fingerprint
from cluster.errors import ModelLoadError

# Where weights are looked for, in this order. An index says which tensor is in which shard.
_SAFETENSORS = ("model.safetensors.index.json", "model.safetensors", "*.safetensors")
_PICKLES = ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin", "*.pt")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file with weights. `tensors` are those that an index says it holds; None without an index: all that it has."""

    path: Path
    tensors: frozenset[str] | None = None

    @property
    def pickled(self) -> bool:
        """Whether torch's unpickler must read it."""
        return self.path.suffix != ".safetensors"


def read_draft_config(folder: Path) -> dict[str, Any]:
    """The `config.json` of a draft's folder. Raises ModelLoadError if it is missing or no JSON object.

    It may name code of its own (`auto_map`), as published drafts of known layouts do: nothing here ever runs it.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"draft is {folder}, but must be an existing folder: give the path of a draft's folder.")
    return _read_json(folder / "config.json", "a draft's folder has one: give a complete checkpoint")


def check_architecture(folder: Path, config: dict[str, Any], what: str, known: Collection[str]) -> str:
    """The one entry of the configuration's `architectures`. Raises ModelLoadError unless it is among `known`.

    `what` names the kind of draft, such as "EAGLE3 head".
    """
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in known:
        return str(names[0])
    code = ", and needs Python code from its folder (auto_map), which is never run" if "auto_map" in config else ""
    raise ModelLoadError(
        f"{folder}/config.json names architectures {names}{code}, but the known ones for this {what} are "
        f"{', '.join(sorted(known))}: use such a checkpoint or another speculation method."
    )


def weight_files_of(folder: Path, allow_pickle: bool = False) -> tuple[WeightFile, ...]:
    """The files that hold the draft's weights: safetensors, or else pickles if `allow_pickle`.

    Raises ModelLoadError if there are none, if there are only pickles that aren't allowed, or if an index names a file
    that is missing or lies elsewhere.
    """
    found = _find(folder, _SAFETENSORS)
    if found:
        return found
    pickles = _find(folder, _PICKLES)
    if not pickles:
        raise ModelLoadError(f"{folder} holds no weights (*.safetensors): give a complete checkpoint.")
    if not allow_pickle:
        raise ModelLoadError(
            f"{folder} holds pickled weights only ({pickles[0].path.name}), and speculative.allow_pickle is not set: "
            "convert them to safetensors, or set it for a file that you trust."
        )
    return pickles


def draft_fingerprint(folder: Path, allow_pickle: bool = False) -> str:
    """Identity of a draft: its configuration, and name, shape and content of its tensors, by sample or checksum."""
    config, files = read_draft_config(folder), weight_files_of(folder, allow_pickle)
    if not files[0].pickled:
        return fingerprint(config, tuple(file.path for file in files))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for file in files:
        # An archive's directory lists the checksum of every tensor's bytes.
        with open_archive(file.path) as archive:
            entries = [(entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist()]
        digest.update(json.dumps(entries).encode())
    return digest.hexdigest()


def open_archive(path: Path) -> zipfile.ZipFile:
    """The archive that `torch.save` makes. Raises ModelLoadError for any other file."""
    try:
        return zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile, ValueError) as error:
        raise ModelLoadError(
            f"{path} is no whole file as torch.save writes it ({error}): fetch it again or convert it to safetensors."
        ) from None


def _find(folder: Path, patterns: tuple[str, ...]) -> tuple[WeightFile, ...]:
    """The files of the first pattern that matches any."""
    for pattern in patterns:
        paths = sorted(path for path in folder.glob(pattern) if path.is_file())
        if paths and pattern.endswith(".json"):
            return _shards(paths[0])
        if paths:
            return tuple(WeightFile(path) for path in paths)
    return ()


def _shards(index: Path) -> tuple[WeightFile, ...]:
    weight_map = _read_json(index, "it is damaged: fetch it again").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelLoadError(f"{index} has no weight_map of tensors to files: fetch it again.")
    tensors: dict[str, set[str]] = {}
    for name, shard in weight_map.items():
        tensors.setdefault(shard, set()).add(name)
    kind = index.name.removesuffix(".index.json").rpartition(".")[2]
    for shard in tensors:
        # A bare file name in every notation, so that an index can't reach out of the folder.
        if not shard == PurePosixPath(shard).name == PureWindowsPath(shard).name or not shard.endswith(f".{kind}"):
            raise ModelLoadError(f"{index} names the file {shard!r}, but shards are *.{kind} files beside it.")
        if not (index.parent / shard).is_file():
            raise ModelLoadError(f"{index} names {shard}, which is missing: fetch the checkpoint again.")
    return tuple(WeightFile(index.parent / shard, frozenset(names)) for shard, names in sorted(tensors.items()))


def _read_json(path: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing, but {remedy}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is no readable JSON ({error}): fetch it again.") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds a {type(content).__name__}, but must hold a JSON object: fetch it again.")
    return content
