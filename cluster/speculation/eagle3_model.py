"""The EAGLE3 head: one fused decoder layer that drafts from a target's hidden states.

Owns: the head's arithmetic and its safetensors file. Invariant: module names equal the tensor names of the public
"speculators" layout, so a state dict is a checkpoint. It is a `cluster.speculation.recurrent.HiddenHead`: paged when
it serves, over whole sequences in `cluster.training`.

Source: EAGLE-3 (Li et al., 2025) and its `cnets.py`. With t the tokens and H_i the target's concatenated aux states
at position i, row i is fed E(t_{i+1}) and h_i = fc(H_i); a later draft step is fed the previous step's output in
place of h_i.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cluster.engine.attention import AttentionPlan, AttentionSpec
from cluster.engine.kv_tensors import KvLayout, LayerKv
from cluster.errors import ModelLoadError
from cluster.speculation.eagle3_config import Eagle3Config

_WEIGHTS = "model.safetensors"
_ALIASES = (("model.", ""), ("midlayer.", "layers.0."))


class Eagle3Head(nn.Module):
    """An EAGLE3 head over a target's embedding [vocab, H], which it borrows and never saves unless it has its own."""

    d2t: Tensor
    t2d: Tensor
    target_embedding: Tensor

    def __init__(self, config: Eagle3Config, target_embedding: Tensor) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.aux_layer_ids) * config.target_hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config.num_layers))
        self.norm = _Norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary = LlamaRotaryEmbedding(_rotary_config(config))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        self.register_buffer("target_embedding", target_embedding.detach(), persistent=False)

    @property
    def kv_layout(self) -> KvLayout:
        """One cache of the config's KV heads for each layer."""
        layer = LayerKv(self.config.num_kv_heads, self.config.head_dim, self.config.head_dim)
        return KvLayout((layer,) * self.config.num_layers, self.fc.weight.dtype)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Indices into transformers' `hidden_states` (the embedding's output is 0) that `combine` expects, in order."""
        return self.config.aux_layer_ids

    @property
    def max_positions(self) -> int:
        """Positions that the head can hold."""
        return self.config.max_position_embeddings

    @property
    def target_ids(self) -> Tensor:
        """[draft vocabulary] the target's id of each draft id."""
        return self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.device))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    def combine(self, aux: Tensor) -> Tensor:
        """Projects target states [T, n_aux * H_target] to [T, H]; applied once per target position."""
        projected: Tensor = self.fc(aux)
        return projected

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """One draft step: `token_ids` [T], `hidden` [T, H], `positions` [T] -> feedback [T, H] (before the norm)."""
        embedded = embedding(token_ids, self.target_embedding).to(hidden.dtype)
        cos, sin = self.rotary(hidden, positions.unsqueeze(0))
        rotation = (cos[0].unsqueeze(1), sin[0].unsqueeze(1))
        for layer in self.layers:
            hidden = layer(embedded, hidden, rotation, plan)
        return hidden

    def logits(self, feedback: Tensor) -> Tensor:
        """Draft logits [T, draft_vocab] of `forward`'s output [T, H]."""
        scores: Tensor = self.lm_head(self.norm(feedback))
        return scores

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Maps ids of the draft vocabulary (any shape) to ids of the target's."""
        return draft_ids + self.d2t[draft_ids]

    @classmethod
    def load(
        cls, folder: Path, target_embedding: Tensor, dtype: torch.dtype, target_layers: int | None = None
    ) -> Eagle3Head:
        """Loads `folder/config.json` and `folder/model.safetensors` in `dtype`, ready for inference.

        A checkpoint without `embed_tokens.weight` uses `target_embedding` [vocab, H]. `target_layers` is needed only
        where the config names no aux layers. Raises `ModelLoadError` naming the tensor that is missing or misshapen.
        """
        config = Eagle3Config.from_folder(folder, target_layers)
        tensors = _read_weights(folder)
        own_embedding = tensors.pop("embed_tokens.weight", None)
        table = target_embedding if own_embedding is None else own_embedding
        expected = (config.vocab_size, config.hidden_size)
        if tuple(table.shape) != expected:
            owner = "the target's" if own_embedding is None else "its own"
            raise ModelLoadError(
                f"EAGLE3 head in {folder} expects an embedding of shape {expected} but {owner} is {tuple(table.shape)};"
                " use the draft that was trained for this target."
            )
        head = cls(config, table.to(dtype))
        head._take(tensors, folder)
        return head.to(dtype).eval().requires_grad_(False)

    def _take(self, tensors: dict[str, Tensor], folder: Path) -> None:
        same_vocabulary = self.config.draft_vocab_size == self.config.vocab_size
        for name, own in self.state_dict().items():
            given = tensors.get(name)
            if given is None:
                if name == "t2d" or (name == "d2t" and same_vocabulary):
                    continue
                raise ModelLoadError(f"EAGLE3 head in {folder} lacks tensor {name}; use a complete checkpoint.")
            if given.shape != own.shape:
                raise ModelLoadError(
                    f"EAGLE3 tensor {name} in {folder} has shape {tuple(given.shape)} but config.json asks for"
                    f" {tuple(own.shape)}; use a checkpoint whose config.json belongs to it."
                )
            own.copy_(given)
        ids = self.to_target_ids(torch.arange(self.config.draft_vocab_size))
        if int(ids.min()) < 0 or int(ids.max()) >= self.config.vocab_size:
            raise ModelLoadError(
                f"EAGLE3 tensor d2t in {folder} maps to token {int(ids.max())} but the vocabulary has"
                f" {self.config.vocab_size}; use the draft that was trained for this target."
            )
        if "t2d" not in tensors:
            self.t2d.zero_()[ids] = True


class _Layer(nn.Module):
    """A Llama decoder layer; the first one attends over [embedding, hidden], twice the width."""

    def __init__(self, config: Eagle3Config, index: int) -> None:
        super().__init__()
        self._index, self._norm_before_residual = index, config.norm_before_residual
        self.input_layernorm = _Norm(config)
        self.hidden_norm = _Norm(config) if index == 0 else None
        self.self_attn = _Attention(config, width=config.hidden_size * (2 if index == 0 else 1), index=index)
        self.post_attention_layernorm = _Norm(config)
        self.mlp = _Mlp(config)

    def forward(self, embedded: Tensor, hidden: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
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


class _Norm(nn.Module):
    """Root-mean-square norm in the input's precision, whatever that of the weight: mixed ones miss the fused kernel."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self._eps = config.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config, width: int, index: int) -> None:
        super().__init__()
        self._index, self._head_dim = index, config.head_dim
        self._spec = AttentionSpec(scale=config.head_dim**-0.5)
        self.q_proj = nn.Linear(width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, entering: Tensor, rotation: tuple[Tensor, Tensor], plan: AttentionPlan) -> Tensor:
        rows = (entering.shape[0], -1, self._head_dim)
        q = _rotate(self.q_proj(entering).view(rows), rotation)
        k = _rotate(self.k_proj(entering).view(rows), rotation)
        v = self.v_proj(entering).view(rows)
        attended = plan.run(self._index, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self._spec)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output


class _Mlp(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _rotary_config(config: Eagle3Config) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
    )


def _read_weights(folder: Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    if not path.is_file():
        raise ModelLoadError(f"EAGLE3 folder {folder} has no {_WEIGHTS}; only safetensors checkpoints are loaded.")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is not a readable safetensors file ({error}); fetch it again.") from error
    for old, new in _ALIASES:
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    return tensors
