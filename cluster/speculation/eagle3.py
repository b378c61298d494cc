"""The eagle3 mode: an EAGLE3 head, found in a draft's folder and checked against its target (Li et al. 2025).

Called by the factory. How the head drafts is `cluster.speculation.recurrent`'s.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor

from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.recurrent import RecurrentDrafter
from cluster.speculation.source import DraftSource, different_vocabulary


def build_eagle3(source: DraftSource) -> RecurrentDrafter:
    """The head in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    target = source.target
    embedding = cast(Tensor, target.model.get_input_embeddings().weight)
    head = Eagle3Head.load(source.folder, embedding, target.dtype, target.num_layers).to(target.device)
    source.check_hidden("EAGLE3 head", head.config.target_hidden_size, head.hidden_layers)
    if head.config.vocab_size != target.vocab_size:
        raise different_vocabulary(f"it has {head.config.vocab_size} tokens, the target {target.vocab_size}")
    return RecurrentDrafter(SpeculationMethod.EAGLE3, head, source.sampler, source.max_drafts)
