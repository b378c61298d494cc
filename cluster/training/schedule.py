"""Which samples make up which optimizer step, and at what rate it learns.

Owns: the order of the data and the learning rate, both pure functions of the seed and of what has been done, so that a
resumed training goes on exactly as if it had never stopped. Used by `cluster.training.trainer`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

_WARMUP = 0.02
_FLOOR = 0.02
_POOL = 64  # batches that are sorted by length together: little padding, still a random order


def batches(lengths: Sequence[int], batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """Endless batches of sample numbers, each of about `batch_tokens` tokens; every epoch has an order of its own."""
    epoch = 0
    while True:
        rng = random.Random(f"{seed}/{epoch}")
        order = list(range(len(lengths)))
        rng.shuffle(order)
        pool_size = max(1, _POOL * batch_tokens * len(lengths) // max(1, sum(lengths)))
        pools = [order[i : i + pool_size] for i in range(0, len(order), pool_size)]
        for pool in pools:
            groups = _by_length(pool, lengths, batch_tokens)
            rng.shuffle(groups)
            yield from groups
        epoch += 1


def learning_rate(peak: float, done: float) -> float:
    """Rate after the share `done` (0 to 1) of the training: a linear warm-up, then half a cosine."""
    if done < _WARMUP:
        return peak * max(done, 1e-4) / _WARMUP
    falling = (min(done, 1.0) - _WARMUP) / (1 - _WARMUP)
    return peak * (_FLOOR + (1 - _FLOOR) * 0.5 * (1 + math.cos(math.pi * falling)))


def _by_length(pool: list[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    groups: list[list[int]] = []
    held = 0
    for number in sorted(pool, key=lambda i: lengths[i]):
        if not groups or held + lengths[number] > batch_tokens:
            groups.append([])
            held = 0
        groups[-1].append(number)
        held += lengths[number]
    return groups
