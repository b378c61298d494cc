"""The KV of a whole sequence, computed afresh in one unchunked pass over an empty pool.

Invariant: nothing is shared with the serving pools, so the result is what their published blocks are judged by.
Called by the drafters' `recompute`, by the KV audit and by the span check.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.engine.model import LoadedModel
from cluster.engine.runner import PagedModel
from cluster.speculation.protocol import LayerKeysValues

# The block table of a pool that holds one sequence in one block.
WHOLE_SEQUENCE = (0,)


def recomputed(
    layout: KvLayout, device: torch.device, slots: int, run: Callable[[KvTensors], None]
) -> list[LayerKeysValues]:
    """Keys and values [slots, kv_heads, dim] of each layer, after `run` filled a pool of one block."""
    kv = KvTensors(layout, num_blocks=1, block_size=max(slots, 1), device=device)
    if slots:
        run(kv)
    return [kv.read(layer, WHOLE_SEQUENCE, slots) for layer in range(len(layout.layers))]


def recompute_model(
    loaded: LoadedModel, tokens: Sequence[int], hidden_layers: tuple[int, ...] = ()
) -> tuple[list[LayerKeysValues], Tensor | None]:
    """A model's KV of `tokens`, and its hidden states [len(tokens), n * H] at `hidden_layers`."""
    states: list[Tensor | None] = [None]

    def run(kv: KvTensors) -> None:
        batch = pack([PagedRow(tokens, 0, WHOLE_SEQUENCE)], kv)
        last = torch.tensor([len(tokens) - 1], device=loaded.device)
        states[0] = PagedModel(loaded, kv).forward(batch, last, hidden_layers).hidden

    return recomputed(loaded.layout, loaded.device, len(tokens), run), states[0]
