"""A training's state on disk, so that it can stop at any moment and go on.

Owns: the file of a checkpoint: weights and the optimizer's moments in safetensors, counters in its metadata. Invariant:
the file appears by a rename, so a checkpoint is whole or is the one before. Used by `cluster.training.trainer`.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.optim import Optimizer

from cluster.training.ttt import TrainableHead

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class TrainingState:
    """How far a training is: optimizer steps, tokens trained on, running mean of the first draft's loss."""

    steps: int = 0
    passes: int = 0
    loss: float | None = None


def save_checkpoint(path: Path, head: TrainableHead, optimizer: Optimizer, state: TrainingState) -> None:
    """Writes the state after `state.steps` steps."""
    tensors = {f"head.{name}": tensor.contiguous() for name, tensor in head.state_dict().items()}
    for name, parameter in head.named_parameters():
        for moment in _MOMENTS:
            tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment]
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"state": json.dumps(asdict(state))})
    os.replace(partial, path)


def load_checkpoint(path: Path, head: TrainableHead, optimizer: Optimizer) -> TrainingState:
    """Restores `head` and `optimizer` and returns how far they are; a fresh state if there is no checkpoint."""
    if not path.exists():
        return TrainingState()
    with safe_open(path, framework="pt") as file:
        state = TrainingState(**json.loads(file.metadata()["state"]))
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    head.load_state_dict({name.removeprefix("head."): t for name, t in tensors.items() if name.startswith("head.")})
    for name, parameter in head.named_parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(float(state.steps)),
            **{moment: tensors[f"{moment}.{name}"] for moment in _MOMENTS},
        }
    return state
