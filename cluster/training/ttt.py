"""The training-time test: the head's forward over whole sequences, several draft steps deep.

Owns: which rows and keys a draft step sees, batched. Used by the trainer (for the loss) and by `evaluate` (step k of
a chain that has been right so far sees exactly what it would see when serving, so acceptance can be read off one
forward).

Source: EAGLE-3, section 3.2. Step 0 is fed the target's states; step k is fed the output of step k - 1, moved on by
one position. A query of step k at position i sees the step-0 keys of positions up to i - k (real context) and, for s
in 1..k, the step-s key of position i - k + s (the drafts that lead up to it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from cluster.engine.attention import AttentionSpec
from cluster.speculation.recurrent import HiddenHead
from cluster.training.capture import CapturedSample


class TrainableHead(HiddenHead, Protocol):
    """A head whose weights can be trained and kept: any torch module that is a `HiddenHead`."""

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...

    def train(self, mode: bool = True) -> Any: ...


@dataclass(frozen=True)
class TttBatch:
    """B sequences padded on the right to n tokens. Row i of T = n - 1 is the pair (state i, token i + 1).

    `next_tokens` [B, T], `aux` [B, T, n_aux * H]; `labels` [B, T] is the token after next, which row i drafts;
    `label_states` [B, T, H] are the target's last states whose logits are its distribution; `learned` [B, T] marks the
    rows whose label is an answer token that the target itself chose in a decode step.
    """

    next_tokens: Tensor
    aux: Tensor
    labels: Tensor
    label_states: Tensor
    learned: Tensor

    @classmethod
    def of(cls, samples: Sequence[CapturedSample]) -> TttBatch:
        """Pads and stacks `samples`."""
        width = max(len(sample.tokens) for sample in samples)
        tokens = torch.stack([pad(sample.tokens, (0, width + 1 - len(sample.tokens))) for sample in samples])
        aux = torch.stack([pad(sample.aux, (0, 0, 0, width - len(sample.aux))) for sample in samples])
        last = torch.stack([pad(sample.last, (0, 0, 0, width - len(sample.last))) for sample in samples])
        drafted = torch.arange(2, width + 1)  # the position that row i drafts is i + 2
        lengths = torch.tensor([len(sample.tokens) for sample in samples]).unsqueeze(1)
        prompts = torch.tensor([sample.prompt_tokens for sample in samples]).unsqueeze(1)
        return cls(
            next_tokens=tokens[:, 1:width],
            aux=aux[:, :-1],
            labels=tokens[:, 2 : width + 1],
            label_states=last[:, 1:],
            # The first answer token comes out of the prefill: no draft was ever asked for it.
            learned=(drafted > prompts) & (drafted < lengths),
        )


def ttt_steps(head: HiddenHead, batch: TttBatch, steps: int) -> Iterator[Tensor]:
    """Yields the feedback [B, T, H] of each draft step; rows i < k of step k belong to no chain and mean nothing."""
    rows, width = batch.next_tokens.shape
    plan = _TttPlan(rows, width)
    hidden = head.combine(batch.aux.flatten(0, 1).to(head.kv_layout.dtype))
    token_ids = batch.next_tokens.reshape(-1)
    positions = torch.arange(width).repeat(rows)
    for _ in range(steps):
        feedback = head.forward(token_ids, hidden, positions, plan).view(rows, width, -1)
        yield feedback
        hidden = pad(feedback[:, :-1], (0, 0, 1, 0)).flatten(0, 1)
        plan.next_step()


class _TttPlan:
    """An `AttentionPlan` of the running step over the keys of all steps so far, for heads of any number of layers."""

    def __init__(self, rows: int, width: int) -> None:
        self._rows, self._width, self._step = rows, width, 0
        self._keys: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._mask = self._visible()

    def next_step(self) -> None:
        self._step += 1
        self._mask = self._visible()

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        if spec.window is not None:
            raise ValueError(f"layer {layer} has a window of {spec.window}, but training attends to the whole context")
        shape = (self._rows, self._width)
        q, k, v = (x.reshape(x.shape[0], *shape, -1).transpose(0, 1) for x in (query, key, value))
        written = self._keys.setdefault(layer, [])
        written.append((k, v))
        keys = torch.cat([pair[0] for pair in written], dim=2)
        values = torch.cat([pair[1] for pair in written], dim=2)
        # Query heads that share a KV head become more query rows of it.
        groups = q.shape[1] // k.shape[1]
        folded = q.reshape(self._rows, k.shape[1], groups * self._width, q.shape[-1])
        mask = self._mask.repeat(groups, 1)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=spec.scale)
        return out.view(*q.shape[:3], -1).transpose(1, 2).flatten(0, 1)

    def _visible(self) -> Tensor:
        """[T, (step + 1) * T], the keys of the steps one after the other."""
        query, key = torch.arange(self._width).unsqueeze(1), torch.arange(self._width)
        context = key <= query - self._step
        drafts = [key == query - self._step + s for s in range(1, self._step + 1)]
        return torch.cat([context, *drafts], dim=1)
