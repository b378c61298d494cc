"""The eagle mode: an EAGLE-1 or EAGLE-2 head, found in a draft's folder and checked against its target.

Called by the factory. How the head drafts is `cluster.speculation.recurrent`'s.
"""

from __future__ import annotations

from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle_model import EagleHead
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.recurrent import RecurrentDrafter
from cluster.speculation.source import DraftSource


def build_eagle(source: DraftSource) -> RecurrentDrafter:
    """The head in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    target = source.target
    borrowed = BorrowedWeights.of(target.model)
    head = EagleHead.load(source.folder, borrowed, target.dtype, target.num_layers, source.config.allow_pickle)
    source.check_hidden("EAGLE head", head.config.layer.hidden_size, head.hidden_layers)
    source.check_rows(head.config.vocab_size)
    head = head.to(target.device)
    return RecurrentDrafter(SpeculationMethod.EAGLE, head, source.sampler, source.max_drafts, source.tree)
