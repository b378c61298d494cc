"""Drafts of several positions out of one pass (An et al. 2025, Chen et al. 2026).

The pass gives logits for every position at once: tokens that aren't known yet are stood for by a mask token. The drafts
are then chosen one after the other, each with the clocks of its own position and, where penalties count tokens, with
the drafts before it. Invariant: masks lie in scratch slots, so that their KV is never published. Called by the
drafters that draft in parallel.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.speculation.chain import Chain, DraftChooser, chain_width, draft_chains
from cluster.speculation.protocol import DraftTask

ParallelForward = Callable[[Sequence[DraftTask], Sequence[int]], Tensor]
"""Writes every task's slots. Logits [sum(widths), V], of each task the first `widths[i]` positions to be drafted."""


def draft_parallel(
    tasks: Sequence[DraftTask], shape: DraftShape, chooser: DraftChooser, forward: ParallelForward
) -> list[Drafts]:
    """The drafts of each task. Raises ValueError for a task that breaks its contract, before anything is written."""
    return draft_chains(tasks, shape, chooser, _OnePass(shape, forward))


class _OnePass:
    """A chain model whose first pass has the answers to all that follow."""

    def __init__(self, shape: DraftShape, forward: ParallelForward) -> None:
        self._shape = shape
        self._forward = forward
        self._logits: tuple[Tensor, ...] = ()

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        widths = [0] * len(tasks)
        for i in drafting:
            widths[i] = chain_width(tasks[i], self._shape)
        logits = self._forward(tasks, widths)
        self._logits = torch.split(logits, [widths[i] for i in drafting]) if drafting else ()
        return torch.stack([rows[0] for rows in self._logits]) if drafting else logits

    def feed(self, chains: Sequence[Chain]) -> Tensor:
        return torch.stack([self._logits[chain.place][len(chain.drafts)] for chain in chains])
