"""Which arithmetic is fast on this machine.

Owns: the choice between float32 and bfloat16 for capture and training. It is measured, not looked up: bfloat16 is
many times faster on CPUs with matrix units (AMX) and several times slower on those that emulate it. Called by
`cluster.training.train`.
"""

from __future__ import annotations

import time

import torch

from cluster.training.options import ComputeDtype

_ROWS, _WIDTH = 256, 768
_REPEATS = 8


def compute_dtype(choice: ComputeDtype) -> torch.dtype:
    """The dtype that `choice` names; for auto the one whose matrix product takes less time here."""
    if choice == "auto":
        return min((torch.float32, torch.bfloat16), key=_seconds)
    return torch.float32 if choice == "float32" else torch.bfloat16


def _seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(_ROWS, _WIDTH, dtype=dtype), torch.ones(_WIDTH, _WIDTH, dtype=dtype)
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - start)
    return min(times)
