"""Drafts by an independent model that was taught to guess K tokens in one pass (PARD, An et al. 2025).

The checkpoint is an ordinary causal model whose `config.json` names the mask token, `pard_token`. A task's known tokens
are followed by K - 1 masks: the last known token's row drafts the first token, mask j the one j places further on.
Since attention is causal, KV of known tokens is that of the plain model: slot i depends on tokens 0..i, the pool has
its own cursor, and masks lie in scratch slots. Built by the factory, called by the step loop.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cluster.core.drafts import Drafts
from cluster.engine.batch import PagedRow
from cluster.engine.model import LoadedModel, load_target
from cluster.engine.sampler import Sampler
from cluster.errors import ModelLoadError
from cluster.speculation.draft_model import ModelDrafter
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.parallel import draft_parallel
from cluster.speculation.protocol import DraftTask
from cluster.speculation.source import DraftSource


def build_pard(source: DraftSource) -> PardDrafter:
    """The model in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded, doesn't fit, or
    doesn't say which token its masks are."""
    loaded = load_target(source.folder, source.config.dtype, source.target.device)
    mask = getattr(loaded.config, "pard_token", None)
    if type(mask) is not int or not 0 <= mask < loaded.vocab_size:
        raise ModelLoadError(
            f"pard_token in {source.folder}/config.json is {mask}, but must be a token id below {loaded.vocab_size}: "
            "use a PARD checkpoint, or method draft_model for an ordinary one."
        )
    source.check_vocabulary(loaded.vocab_size, mask)
    return PardDrafter(loaded, mask, source.sampler, source.max_drafts)


class PardDrafter(ModelDrafter):
    """`mask` is the id of the mask token; `sampler` is the target's: its vocabulary decides which tokens exist."""

    method = SpeculationMethod.PARD

    def __init__(self, loaded: LoadedModel, mask: int, sampler: Sampler, max_drafts: int) -> None:
        super().__init__(loaded, sampler, max_drafts)
        self._mask = mask

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        return draft_parallel(tasks, self.shape, self.chooser, self._with_masks)

    def _with_masks(self, tasks: Sequence[DraftTask], widths: Sequence[int]) -> Tensor:
        masks = [(self._mask,) * max(0, width - 1) for width in widths]
        rows = [
            PagedRow((*task.tokens[task.start : task.end], *guessed), task.start, task.block_table, task.held)
            for task, guessed in zip(tasks, masks, strict=True)
        ]
        return self.run(rows, widths)
