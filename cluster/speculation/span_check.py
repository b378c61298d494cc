"""Measures the lookahead span of a loaded draft: which draft slots does a token reach back to?

The token at j is flipped in a sequence; the first slot s whose KV changes shows that KV of slot s depends on token j,
so the span is j - s. Invariant: a draft that looks further ahead than its method declares is never served, since its
KV would be shared between prompts that differ where it looks. Called by the factory at start-up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.engine.model import LoadedModel
from cluster.errors import ModelLoadError
from cluster.speculation.protocol import Drafter, LayerKeysValues
from cluster.speculation.recompute import recompute_model

_LENGTH = 13
_FLIPPED = (5, 8, 12)
# Far above the rounding of one and the same pass, far below the effect of another token.
_CHANGED = 1e-5


def check_span(drafter: Drafter, target: LoadedModel) -> None:
    """Raise ModelLoadError if the draft's KV looks further ahead than its method declares."""
    declared = drafter.shape.span
    if declared is None:  # no draft KV, or none that is shared
        return
    measured = measure_span(drafter, target)
    if measured > declared:
        raise ModelLoadError(
            f"The draft's KV depends on {measured} tokens ahead, but {drafter.method} declares a span of {declared}: "
            "its blocks can't be reused safely, use a checkpoint of that method."
        )


def measure_span(drafter: Drafter, target: LoadedModel) -> int:
    """The largest distance from a token back to the first slot whose draft KV it changes; 0 if it changes none."""
    step = max(1, target.vocab_size // (_LENGTH + 1))
    tokens = [(7 + i * step) % target.vocab_size for i in range(_LENGTH)]
    before = _slots(drafter, target, tokens)
    spans = [0]
    for j in _FLIPPED:
        flipped = [*tokens[:j], (tokens[j] + 1) % target.vocab_size, *tokens[j + 1 :]]
        changed = (_slots(drafter, target, flipped) - before).abs().amax(dim=1) > _CHANGED * before.abs().max()
        if changed.any():
            spans.append(j - int(changed.nonzero()[0]))
    return max(spans)


def _slots(drafter: Drafter, target: LoadedModel, tokens: Sequence[int]) -> Tensor:
    """The draft KV of `tokens`, everything of a slot in one row."""
    hidden = None
    if drafter.hidden_layers:
        _, hidden = recompute_model(target, tokens, drafter.hidden_layers)
    layers = drafter.recompute(tokens, hidden)
    return torch.cat([_flat(layer) for layer in layers], dim=1)


def _flat(layer: LayerKeysValues) -> Tensor:
    return torch.cat([states.flatten(1) for states in layer], dim=1).float()
