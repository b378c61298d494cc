"""The EAGLE3 head: one fused decoder layer that drafts from a target's hidden states.

Owns: the head's arithmetic and how a checkpoint becomes one. Invariant: module names equal the tensor names of the
public "speculators" layout, so a state dict is a checkpoint. It is a `cluster.speculation.recurrent.HiddenHead`: paged
when it serves, over whole sequences in `cluster.training`.

Source: EAGLE-3 (Li et al., 2025) and its `cnets.py`. With t the tokens and H_i the target's concatenated aux states
at position i, row i is fed E(t_{i+1}) and h_i = fc(H_i); a later draft step is fed the previous step's output in
place of h_i.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from cluster.engine.attention import AttentionPlan
from cluster.engine.kv_tensors import KvLayout
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.decoder_layer import Attention, Mlp, Norm
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.draft_tensors import fill, read_draft_tensors
from cluster.speculation.eagle3_config import Eagle3Config
from cluster.speculation.eagle3_dialects import with_our_names
from cluster.speculation.rotary import Rotation


class Eagle3Head(nn.Module):
    """An EAGLE3 head over an embedding [vocab, H] that it never saves: the target's, or the checkpoint's own."""

    d2t: Tensor
    token_embedding: Tensor

    def __init__(self, config: Eagle3Config, token_embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        shape, states = config.layer, len(config.aux_layer_ids)
        width, eps = states * config.target_hidden_size, shape.rms_norm_eps
        self.input_norm = Norm(width, eps) if config.norm_before_fc else None
        self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, eps) for _ in range(states * config.fc_norm))
        self.fc = nn.Linear(width, shape.hidden_size, bias=config.fc_bias) if config.projects else None
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(shape.num_layers))
        self.norm = Norm(shape.hidden_size, eps) if config.final_norm else nn.Identity()
        self.lm_head = nn.Linear(shape.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = shape.rotary()
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("token_embedding", token_embedding.detach(), persistent=False)

    @property
    def kv_layout(self) -> KvLayout:
        """One cache of the config's KV heads for each layer."""
        return self.config.layer.layout(self.lm_head.weight.dtype)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Indices into transformers' `hidden_states` (the embedding's output is 0) that `combine` expects, in order."""
        return self.config.aux_layer_ids

    @property
    def max_positions(self) -> int:
        """Positions that the head can hold."""
        return self.config.layer.max_positions

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] the target's id of each draft id."""
        return torch.arange(self.config.draft_vocab_size, device=self.device) + self.d2t

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    def combine(self, states: Tensor) -> Tensor:
        """Projects target states [T, n_aux * H_target] to [T, H]; applied once per target position."""
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            chunks = states.chunk(len(self.fc_norm), dim=-1)
            states = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return states if self.fc is None else self.fc(states)

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """One draft step: `token_ids` [T], `hidden` [T, H], `positions` [T] -> feedback [T, H].

        The feedback is the last layer's output, before the final norm unless the config has `norm_output`.
        """
        embedded = embedding(token_ids, self.token_embedding).to(hidden.dtype)
        rotation = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(embedded, hidden, rotation, plan)
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, feedback: Tensor) -> Tensor:
        """Draft logits [T, draft_vocab] of `forward`'s output [T, H]."""
        scores: Tensor = self.lm_head(feedback if self.config.norm_output else self.norm(feedback))
        return scores

    @classmethod
    def load(
        cls,
        folder: Path,
        borrowed: BorrowedWeights,
        dtype: torch.dtype,
        target_layers: int | None = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Loads the checkpoint in `folder`, of any dialect, in `dtype`, ready for inference.

        What it has no embedding or output matrix for is `borrowed`. `target_layers` is needed only where the config
        names no aux layers. Raises `ModelLoadError` naming the tensor that is missing or doesn't fit.
        """
        config = Eagle3Config.from_folder(folder, target_layers)
        tensors = with_our_names(read_draft_tensors(folder, allow_pickle=allow_pickle))
        table = _embedding(config, tensors.pop("embed_tokens.weight", None), borrowed, folder)
        if "lm_head.weight" not in tensors:
            tensors["lm_head.weight"] = _output_matrix(config, table, borrowed, folder)
        if config.draft_vocab_size == config.vocab_size:
            tensors.setdefault("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        with torch.device("meta"):
            head = cls(config, table.to(dtype))
        fill(head, tensors, "EAGLE3 head", folder)
        _check_ids(head, folder)
        return head.to(dtype).eval().requires_grad_(False)


class _Layer(nn.Module):
    """A decoder layer; the first one attends over [embedding, hidden], twice the width."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        shape: DecoderShape = config.layer
        self._norm_before_residual = config.norm_before_residual
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps) if index == 0 else None
        self.self_attn = Attention(shape, shape.hidden_size * (2 if index == 0 else 1), index)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        residual = hidden
        if self.hidden_norm is None:
            entering = self.input_layernorm(hidden)
        else:
            normed = self.hidden_norm(hidden)
            residual = normed if self._norm_before_residual else hidden
            entering = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        residual = residual + self.self_attn(entering, rotation, plan)
        output: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return output


def _embedding(config: Eagle3Config, own: Tensor | None, borrowed: BorrowedWeights, folder: Path) -> Tensor:
    """The checkpoint's embedding, or else the target's, whose rows may differ by padding."""
    if own is None and borrowed.embedding.shape[1] == config.layer.hidden_size:
        return borrowed.embedding
    expected = (config.vocab_size, config.layer.hidden_size)
    given = borrowed.embedding if own is None else own
    if given is not own or tuple(given.shape) != expected:
        owner = "the target's" if own is None else "its own"
        raise ModelLoadError(
            f"The EAGLE3 head in {folder} expects an embedding of shape {expected}, but {owner} is "
            f"{tuple(given.shape)}: use the draft that was trained for this target."
        )
    return given


def _output_matrix(config: Eagle3Config, table: Tensor, borrowed: BorrowedWeights, folder: Path) -> Tensor:
    """What stands in for an output matrix of the checkpoint's own: the embedding if they are tied, or the target's."""
    given = table if config.tied else borrowed.output
    expected = (config.vocab_size, config.layer.hidden_size)
    if config.draft_vocab_size != config.vocab_size or given.shape[0] < expected[0] or given.shape[1] != expected[1]:
        raise ModelLoadError(
            f"The EAGLE3 head in {folder} lacks tensor lm_head.weight, {config.draft_vocab_size} rows of {expected[1]},"
            f" and the target's {tuple(given.shape)} can't stand in for it: use a complete checkpoint."
        )
    return given[: expected[0]]


def _check_ids(head: Eagle3Head, folder: Path) -> None:
    ids, size = head.target_ids, head.config.vocab_size
    if int(ids.min()) < 0 or int(ids.max()) >= size or len(set(ids.tolist())) < len(ids):
        raise ModelLoadError(
            f"Tensor d2t of the EAGLE3 head in {folder} maps {len(ids)} draft ids to tokens {int(ids.min())} to "
            f"{int(ids.max())}, but must map each to another of the {size}: use a complete checkpoint."
        )
