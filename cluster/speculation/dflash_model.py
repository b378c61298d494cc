"""The DFlash draft: decoder layers whose context is the target's states, and whose queries are a block of masks.

Owns its arithmetic and how a checkpoint becomes one. Invariant: module names equal the tensor names of the public
checkpoints; attention goes through the plan that is given, keys and values of the context through `context`.

Source: DFlash (Chen et al. 2026). The context at position i is c_i = hidden_norm(fc(H_i)) for every layer, with H_i the
target's concatenated states; a layer keeps k_proj(c_i), normed and rotated, and v_proj(c_i). The block's tokens run
through the layers as usual and see all of the context and each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from cluster.engine.attention import AttentionPlan
from cluster.engine.kv_tensors import KvLayout
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.decoder_layer import Attention, Mlp, Norm
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.dflash_config import DFlashConfig
from cluster.speculation.draft_tensors import fill, read_draft_tensors
from cluster.speculation.rotary import Rotation

_WHAT = "DFlash draft"


class DFlashHead(nn.Module):
    """A DFlash draft over an embedding [vocab, H] and an output matrix [vocab, H], which are the target's.

    One with a vocabulary of its own has its own output matrix, `lm_head` [V_draft, H], and `d2t`.
    """

    d2t: Tensor
    token_embedding: Tensor
    token_output: Tensor

    def __init__(self, config: DFlashConfig, borrowed: BorrowedWeights) -> None:
        super().__init__()
        self.config = config
        shape = config.layer
        self.fc = nn.Linear(len(config.target_layers) * config.target_hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self._decoder = [_Layer(shape, index) for index in range(shape.num_layers)]
        self.layers = nn.ModuleList(self._decoder)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.rotary = shape.rotary()
        self.register_buffer("token_embedding", borrowed.embedding, persistent=False)
        self.register_buffer("token_output", borrowed.output, persistent=False)
        self.lm_head: nn.Linear | None = None
        if config.draft_vocab_size < config.vocab_size:
            self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @property
    def kv_layout(self) -> KvLayout:
        """One cache of the config's KV heads for each layer."""
        return self.config.layer.layout(self.fc.weight.dtype)

    @property
    def target_ids(self) -> Tensor | None:
        """[V_draft] int64, the target's id of each draft id; None if they are the same."""
        if self.lm_head is None:
            return None
        return torch.arange(self.config.draft_vocab_size, device=self.device) + self.d2t

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    def combine(self, states: Tensor) -> Tensor:
        """Target states [T, n * H_target] as context [T, H]."""
        context: Tensor = self.hidden_norm(self.fc(states))
        return context

    def context(self, context: Tensor, positions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each layer in turn, keys and values [T, kv_heads, head_dim] of `context` [T, H] at `positions` [T]."""
        rotation = self.rotary(context, positions)
        for layer in self._decoder:
            yield layer.self_attn.keys_values(context, rotation)

    def forward(self, token_ids: Tensor, positions: Tensor, plan: AttentionPlan, windowed: AttentionPlan) -> Tensor:
        """Query blocks: `token_ids` [T] at `positions` [T] -> states [T, H]; `windowed` serves layers with windows."""
        hidden = embedding(token_ids, self.token_embedding).to(self.fc.weight.dtype)
        rotation = self.rotary(hidden, positions)
        for layer, window in zip(self._decoder, self.config.layer.windows, strict=True):
            hidden = layer(hidden, rotation, plan if window is None else windowed)
        return hidden

    def logits(self, states: Tensor) -> Tensor:
        """Logits [R, V_draft] of states [R, H]."""
        normed = self.norm(states)
        scores: Tensor = normed @ self.token_output.t() if self.lm_head is None else self.lm_head(normed)
        return scores

    @classmethod
    def load(
        cls,
        folder: Path,
        borrowed: BorrowedWeights,
        dtype: torch.dtype,
        target_layers: int,
        allow_pickle: bool = False,
    ) -> DFlashHead:
        """Loads the checkpoint in `folder`, for a target of so many layers, in `dtype`, ready for inference.

        Raises ModelLoadError naming what is missing or doesn't fit.
        """
        config = DFlashConfig.from_folder(folder, target_layers)
        width = borrowed.embedding.shape[1]
        if config.layer.hidden_size != width:
            raise ModelLoadError(
                f"The {_WHAT} in {folder} has hidden_size {config.layer.hidden_size}, but reads the target's embedding "
                f"of width {width}: use the draft that was trained for this target."
            )
        if config.mask_token >= len(borrowed.embedding):
            raise ModelLoadError(
                f"The mask token of the {_WHAT} in {folder} is {config.mask_token}, but the target's embedding has "
                f"{len(borrowed.embedding)} rows: use the draft that was trained for this target."
            )
        with torch.device("meta"):
            head = cls(config, borrowed)
        tensors = read_draft_tensors(folder, allow_pickle=allow_pickle, wanted=lambda name: name not in _OF_TARGET)
        if head.lm_head is None:
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ("lm_head.weight", "d2t")}
        fill(head, tensors, _WHAT, folder)
        ids = head.target_ids
        if ids is not None and (int(ids.min()) < 0 or int(ids.max()) >= config.vocab_size):
            raise ModelLoadError(
                f"Tensor d2t of the {_WHAT} in {folder} maps to token {int(ids.max())}, but the vocabulary has "
                f"{config.vocab_size}: use a complete checkpoint."
            )
        return head.to(dtype).eval().requires_grad_(False)


# Copies of the target's weights, and the inverse of `d2t`, which some checkpoints hold as well.
_OF_TARGET = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "t2d")


class _Layer(nn.Module):
    """A plain decoder layer over the block's tokens."""

    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size, index)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, plan)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output
