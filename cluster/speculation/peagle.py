"""The peagle mode: an EAGLE3 head that drafts K tokens in one pass (P-EAGLE, parallel EAGLE).

The head's pairs (H_i, t_{i+1}) are those of EAGLE3, and so is the KV of its slots: slot i depends on tokens 0..i+1. For
the K - 1 pairs that follow, neither state nor token is known yet: a learned state, `mask_hidden`, and the mask token
stand for them, in scratch slots. The last real pair drafts the first token, mask j the one j places further on.
Built by the factory, called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from cluster.core.drafts import Drafts
from cluster.engine.batch import PagedRow, pack
from cluster.engine.sampler import Sampler
from cluster.errors import ModelLoadError
from cluster.speculation.draft_folder import read_draft_config
from cluster.speculation.eagle3 import load_head
from cluster.speculation.eagle3_config import Eagle3Config
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.parallel import draft_parallel
from cluster.speculation.protocol import DraftTask
from cluster.speculation.recurrent import RecurrentDrafter, slot_states
from cluster.speculation.source import DraftSource

# The names that trainers give to the same thing.
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")


def build_peagle(source: DraftSource) -> PEagleDrafter:
    """The head in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    mask = _mask_token(source.folder)
    head = load_head(source, PEagleHead)
    if not 0 <= mask < head.config.vocab_size:
        raise ModelLoadError(
            f"The mask token of {source.folder}/config.json is {mask}, but must be below {head.config.vocab_size}: "
            "use a complete P-EAGLE checkpoint."
        )
    return PEagleDrafter(head, mask, source.sampler, source.max_drafts)


def _mask_token(folder: Path) -> int:
    config = read_draft_config(folder)
    for key in _MASK_KEYS:
        value = config.get(key)
        if value is not None and str(value).isdecimal():
            return int(value)
    raise ModelLoadError(
        f"{folder}/config.json names no mask token ({', '.join(_MASK_KEYS)}): use a P-EAGLE checkpoint, or method "
        "eagle3 for an ordinary one."
    )


class PEagleHead(Eagle3Head):
    """An EAGLE3 head with `mask_hidden` [n_aux * H_target], which stands for states that aren't computed yet."""

    def __init__(self, config: Eagle3Config, token_embedding: Tensor) -> None:
        super().__init__(config, token_embedding)
        self.mask_hidden = nn.Parameter(torch.zeros(len(config.aux_layer_ids) * config.target_hidden_size))


class PEagleDrafter(RecurrentDrafter):
    """`mask` is the id of the mask token; `sampler` is the target's: its vocabulary decides which tokens exist."""

    def __init__(self, head: PEagleHead, mask: int, sampler: Sampler, max_drafts: int) -> None:
        super().__init__(SpeculationMethod.PEAGLE, head, sampler, max_drafts)
        self._mask = mask
        self._mask_state = self.combine(head.mask_hidden[None])

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        return draft_parallel(tasks, self.shape, self._chooser, self._with_masks)

    def _with_masks(self, tasks: Sequence[DraftTask], widths: Sequence[int]) -> Tensor:
        if self._kv is None:
            raise RuntimeError("no pool is attached")
        masks = [max(0, width - 1) for width in widths]
        rows = [
            PagedRow(
                (*task.tokens[task.start + 1 : task.end + 1], *(self._mask,) * count),
                task.start,
                task.block_table,
                task.held,
            )
            for task, count in zip(tasks, masks, strict=True)
        ]
        real = self.combine(torch.cat([slot_states(task) for task in tasks]))
        lengths = [task.end - task.start for task in tasks]
        pairs = zip(torch.split(real, lengths), masks, strict=True)
        states = torch.cat([*chain.from_iterable((known, self._mask_state.expand(n, -1)) for known, n in pairs)])
        batch = pack(rows, self._kv)
        output = self.run(batch, states, self._kv)
        firsts = [extent.offset + length - 1 for extent, length in zip(batch.rows, lengths, strict=True)]
        return self.logits(output[[first + j for first, n in zip(firsts, widths, strict=True) for j in range(n)]])
