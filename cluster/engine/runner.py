"""One forward of a loaded model over a packed batch, against its KV pool.

Owns the calling convention with transformers: no cache of theirs, positions given, logits only where asked for,
hidden states only of the layers asked for. Called by the engine for the target and by the draft_model drafter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.attention import GatherSdpa, PagedAttention
from cluster.engine.batch import PackedBatch
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.model import LoadedModel


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """`logits` `[R, V]` float32, one row per asked index; `hidden` `[T, n * H]`, the asked states side by side."""

    logits: Tensor
    hidden: Tensor | None


class PagedModel:
    """A model with the KV tensors it reads and writes."""

    def __init__(self, loaded: LoadedModel, kv: KvTensors, backend: PagedAttention | None = None) -> None:
        self.loaded = loaded
        self.kv = kv
        self._backend = backend or GatherSdpa()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, logits_index: Tensor, hidden_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Run `batch`. `logits_index` `[R]` picks tokens of it; `hidden_layers` index transformers' `hidden_states`."""
        output = self.loaded.model(
            input_ids=batch.input_ids,
            position_ids=batch.positions,
            use_cache=False,
            logits_to_keep=logits_index,
            output_hidden_states=list(hidden_layers) if hidden_layers else False,
            paged=self._backend.plan(batch, self.kv),
        )
        hidden = None
        if hidden_layers:  # a tuple with one place per hidden state, filled in at least where it was asked for
            hidden = torch.cat([output.hidden_states[i] for i in hidden_layers], dim=-1)[0]
        return ForwardOutput(output.logits[0].float(), hidden)
