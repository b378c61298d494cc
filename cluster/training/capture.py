"""The target's hidden states of all samples, on disk.

Owns: the shards: safetensors files of `SHARD_SAMPLES` samples each, read back memory-mapped, so that training needs
little memory for any amount of text. Invariant: a shard file is complete (it appears by a rename) and shard i holds
samples [i * SHARD_SAMPLES, (i + 1) * SHARD_SAMPLES) or, if it is the last, what there was of them.

A shard holds, for its N tokens in S samples: `tokens` [N] int32, `offsets` [S + 1], `prompt_tokens` [S], `aux` [N,
n_aux * H] (the states that the head reads) and `last` [N, H] (after the final norm: the soft labels are made of it).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from cluster.training.samples import Sample

SHARD_SAMPLES = 256
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class CapturedSample:
    """One sample with its states: `tokens` [n], `aux` [n, n_aux * H], `last` [n, H]."""

    tokens: Tensor
    prompt_tokens: int
    aux: Tensor
    last: Tensor


class CapturedSamples:
    """All captured samples of a folder; tensors are views of mapped files and cost no memory until they are read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shards = [_open_shard(path) for path in paths]
        self._index = [(s, i) for s, shard in enumerate(self._shards) for i in range(len(shard["prompt_tokens"]))]
        self.lengths = [self._bounds(n)[1] - self._bounds(n)[0] for n in range(len(self._index))]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, number: int) -> CapturedSample:
        shard_number, i = self._index[number]
        shard = self._shards[shard_number]
        start, end = self._bounds(number)
        return CapturedSample(
            tokens=shard["tokens"][start:end].long(),
            prompt_tokens=int(shard["prompt_tokens"][i]),
            aux=shard["aux"][start:end],
            last=shard["last"][start:end],
        )

    def _bounds(self, number: int) -> tuple[int, int]:
        shard_number, i = self._index[number]
        offsets = self._shards[shard_number]["offsets"]
        return int(offsets[i]), int(offsets[i + 1])


def capture(
    target: PreTrainedModel,
    samples: Sequence[Sample],
    aux_layer_ids: Sequence[int],
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> CapturedSamples:
    """Runs `target` over `samples` and keeps its states in `folder`; shards that are there already are not made again.

    `progress` is told how many samples are done. Raises `OSError` when the disk is full.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, start in enumerate(range(0, len(samples), SHARD_SAMPLES)):
        part = samples[start : start + SHARD_SAMPLES]
        path = folder / f"shard-{number:05}.safetensors"
        if not _holds(path, part):
            _write_shard(path, part, _states(target, part, aux_layer_ids))
        paths.append(path)
        progress(start + len(part))
    return CapturedSamples(paths)


def _holds(path: Path, samples: Sequence[Sample]) -> bool:
    if not path.exists():
        return False
    with safe_open(path, framework="pt") as file:
        held: list[int] = file.get_tensor("tokens").tolist()
    return held == [token for sample in samples for token in sample.tokens]


def _states(target: PreTrainedModel, samples: Sequence[Sample], aux: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """(aux, last) of each sample. Samples of like length share a forward: with causal attention, what is padded on the
    right of a row is never seen by it, so no mask is needed."""
    by_length = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    states: dict[int, tuple[Tensor, Tensor]] = {}
    while by_length:
        width = len(samples[by_length[-1]].tokens)
        take = max(1, _BATCH_TOKENS // width)
        group, by_length = by_length[-take:], by_length[:-take]
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        for row, i in enumerate(group):
            ids[row, : len(samples[i].tokens)] = torch.tensor(samples[i].tokens)
        with torch.no_grad():
            output = target.base_model(ids.to(target.device), output_hidden_states=True, use_cache=False)
        wanted = torch.cat([output.hidden_states[layer] for layer in aux], dim=-1).cpu()
        last = output.last_hidden_state.cpu()
        for row, i in enumerate(group):
            length = len(samples[i].tokens)
            states[i] = (wanted[row, :length], last[row, :length])
    return [states[i] for i in range(len(samples))]


def _write_shard(path: Path, samples: Sequence[Sample], states: Sequence[tuple[Tensor, Tensor]]) -> None:
    lengths = torch.tensor([0] + [len(sample.tokens) for sample in samples])
    tensors = {
        "tokens": torch.tensor([token for sample in samples for token in sample.tokens], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompt_tokens": torch.tensor([sample.prompt_tokens for sample in samples]),
        "aux": torch.cat([aux for aux, _ in states]),
        "last": torch.cat([last for _, last in states]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    os.replace(partial, path)


def _open_shard(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
