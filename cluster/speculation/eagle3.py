"""The eagle3 mode: an EAGLE3 head, found in a draft's folder and checked against its target (Li et al. 2025).

Called by the factory. How the head drafts is `cluster.speculation.recurrent`'s.
"""

from __future__ import annotations

import logging
from typing import TypeVar

from cluster.observe.logging import event
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.speculation.lookahead import SpeculationMethod
from cluster.speculation.recurrent import RecurrentDrafter
from cluster.speculation.source import DraftSource

_log = logging.getLogger(__name__)

_Head = TypeVar("_Head", bound=Eagle3Head)


def build_eagle3(source: DraftSource) -> RecurrentDrafter:
    """The head in the source's folder as a drafter. Raises ModelLoadError if it can't be loaded or doesn't fit."""
    head = load_head(source, Eagle3Head)
    return RecurrentDrafter(SpeculationMethod.EAGLE3, head, source.sampler, source.max_drafts, source.tree)


def load_head(source: DraftSource, kind: type[_Head]) -> _Head:
    """The head of the source's folder, checked against its target. Raises ModelLoadError if it doesn't fit."""
    target = source.target
    borrowed = BorrowedWeights.of(target.model)
    head = kind.load(source.folder, borrowed, target.dtype, target.num_layers, source.config.allow_pickle)
    config = head.config
    source.check_hidden("EAGLE3 head", config.target_hidden_size, head.hidden_layers)
    source.check_rows(config.vocab_size)
    # The one thing about a checkpoint that can't be told from its tensors: a wrong count only drafts badly.
    _log.info(
        event(
            "eagle3_head",
            dialect=config.dialect,
            counts=config.counted_as.name.lower(),
            hidden_layers=",".join(map(str, head.hidden_layers)),
            of=target.num_layers,
        )
    )
    return head.to(target.device)
