"""Held-out acceptance of a head, read off the target's own greedy answers.

Owns: the measure "mean acceptance length": tokens that come out of one target step, the target's own token included,
with greedy decoding and a chain of k drafts. No serving is needed: as long as a chain is right, what it is fed when
serving is what the training-time test feeds it, so one forward tells for every position how many drafts would have
been accepted there. Called by `cluster.training.trainer` along the way and by `cluster.training.train` at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.speculation.recurrent import HiddenHead
from cluster.training.capture import CapturedSamples
from cluster.training.ttt import TttBatch, ttt_steps

_ROWS = 16


@dataclass(frozen=True)
class Acceptance:
    """`length`: tokens a target step. `conditional[k]`: share of right k-th drafts after k right ones."""

    length: float
    conditional: tuple[float, ...]


@torch.no_grad()
def measure_acceptance(head: HiddenHead, held_out: CapturedSamples, steps: int) -> Acceptance:
    """Acceptance of `head` with chains of `steps` drafts over the answers in `held_out`."""
    tokens, target_steps = 0, 0
    reached, right = torch.zeros(steps), torch.zeros(steps)
    for accepted, ends in _walks(head, held_out, steps):
        for row, (start, end) in zip(accepted, ends, strict=True):
            at = start
            while at < end:
                drafts = min(int(row[at]), end - at - 1)
                tokens, target_steps = tokens + drafts + 1, target_steps + 1
                tried = torch.arange(steps) <= drafts
                reached += tried & (torch.arange(steps) < end - at)
                right += torch.arange(steps) < drafts
                at += drafts + 1
    shares = (right / reached.clamp(min=1)).tolist()
    return Acceptance(tokens / max(1, target_steps), tuple(round(share, 4) for share in shares))


def _walks(
    head: HiddenHead, held_out: CapturedSamples, steps: int
) -> Iterator[tuple[Tensor, Sequence[tuple[int, int]]]]:
    """For groups of samples: accepted drafts [B, n] of a chain that drafts position p first, and the answers' bounds.

    The answer's first token comes from the prefill, so the bounds begin one behind it.
    """
    target_ids = head.target_ids
    order = sorted(range(len(held_out)), key=lambda i: held_out.lengths[i])
    for start in range(0, len(order), _ROWS):
        samples = [held_out[i] for i in order[start : start + _ROWS]]
        batch = TttBatch.of(samples)
        rows, width = batch.labels.shape
        alive = torch.ones(rows, width, dtype=torch.bool)
        accepted = torch.zeros(rows, width + 2 + steps, dtype=torch.int64)
        for step, feedback in enumerate(ttt_steps(head, batch, steps)):
            drafted = head.logits(feedback).argmax(-1)
            if target_ids is not None:
                drafted = target_ids[drafted]
            hit = drafted == batch.labels
            # Row i of step k ends a chain whose first draft was for position i - k + 2.
            moved = torch.zeros_like(alive)
            moved[:, : width - step] = hit[:, step:]
            alive &= moved
            accepted[:, 2 : 2 + width] += alive
        yield accepted, [(sample.prompt_tokens + 1, len(sample.tokens)) for sample in samples]
