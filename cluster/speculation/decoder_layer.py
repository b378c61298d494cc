"""The decoder layer that heads over hidden states are made of: Llama's, or Qwen3's with its norms of queries and keys.

Owns `DecoderShape`, what a checkpoint's `config.json` says about such layers, and their arithmetic over packed rows.
Invariant: module names are those of the public checkpoints, and attention goes through the plan that is given. Used by
the heads of `eagle3_model` and `eagle_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cluster.engine.attention import AttentionPlan, AttentionSpec
from cluster.engine.kv_tensors import KvLayout, LayerKv
from cluster.errors import ModelLoadError

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, 1, head_dim] of the rows' positions."""

_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# The others ("dynamic", "longrope") turn by angles that change with the length, so KV couldn't be reused.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class DecoderShape:
    """Layers of a head. `windows` has the sliding window of each layer; None sees everything."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...] = (None,)
    rms_norm_eps: float = 1e-5
    max_positions: int = 2048
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False

    @property
    def num_layers(self) -> int:
        """Decoder layers, each with a cache of its own."""
        return len(self.windows)

    @classmethod
    def from_document(cls, document: dict[str, Any], num_layers: int | None = None) -> DecoderShape:
        """Reads a Llama's or Qwen3's configuration; what it leaves out is as in transformers' class of that type.

        `num_layers` overrides the document's. Raises `ModelLoadError` for a variant that can't be computed.
        """
        kind = str(document.get("model_type", "llama"))
        if kind not in _CONFIGS:
            raise ModelLoadError(
                f"model_type is {kind}, but the layers of a head must be of {' or '.join(_CONFIGS)}: use another draft."
            )
        try:
            config: Any = _CONFIGS[kind](**{key: value for key, value in document.items() if key != "model_type"})
        except Exception as error:  # whatever transformers' checks raise
            reason = " ".join(str(error).split())
            raise ModelLoadError(f"config.json is no {kind} configuration ({reason}): fetch it again.") from None
        _check(config)
        bias = bool(config.attention_bias)
        layers = num_layers or config.num_hidden_layers
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            windows=_windows(config, layers),
            rms_norm_eps=config.rms_norm_eps,
            max_positions=config.max_position_embeddings,
            rope_parameters=dict(config.rope_parameters),
            qk_norm=kind == "qwen3",
            qkv_bias=bool(document.get("qkv_bias", bias)),
            output_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )

    def layout(self, dtype: torch.dtype) -> KvLayout:
        """The cache of these layers."""
        return KvLayout((LayerKv(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers, dtype)


class Rotary:
    """Rotary angles of any of the known kinds. No module, so that its frequencies stay in float32 with any weights."""

    def __init__(self, shape: DecoderShape) -> None:
        config = LlamaConfig(
            hidden_size=shape.num_heads * shape.head_dim,
            num_attention_heads=shape.num_heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.max_positions,
            rope_parameters=shape.rope_parameters,
        )
        with torch.device("cpu"):  # also where a head is built on the meta device
            angles: Any = LlamaRotaryEmbedding(config)

        self._frequencies: Tensor = angles.inv_freq
        self._scale: float = angles.attention_scaling

    def __call__(self, like: Tensor, positions: Tensor) -> Rotation:
        """For `positions` [T], in the type and on the device of `like`."""
        self._frequencies = self._frequencies.to(like.device)
        angles = (positions.float().unsqueeze(1) * self._frequencies).repeat(1, 2).unsqueeze(1)
        return (angles.cos() * self._scale).to(like.dtype), (angles.sin() * self._scale).to(like.dtype)


class Norm(nn.Module):
    """Root-mean-square norm in the input's precision, whatever that of the weight: mixed ones miss the fused kernel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class Attention(nn.Module):
    """Attention of layer `index` over rows [T, width] -> [T, hidden]."""

    def __init__(self, shape: DecoderShape, width: int, index: int) -> None:
        super().__init__()
        self._index, self._head_dim = index, shape.head_dim
        self._spec = AttentionSpec(scale=shape.head_dim**-0.5, window=shape.windows[index])
        heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(width, heads, bias=shape.qkv_bias)
        self.k_proj = nn.Linear(width, kv_heads, bias=shape.qkv_bias)
        self.v_proj = nn.Linear(width, kv_heads, bias=shape.qkv_bias)
        self.o_proj = nn.Linear(heads, shape.hidden_size, bias=shape.output_bias)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def keys_values(self, entering: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """What is kept of rows [T, width]: keys and values [T, kv_heads, head_dim]."""
        k, v = self._heads(self.k_proj(entering)), self._heads(self.v_proj(entering))
        return _rotate(k if self.k_norm is None else self.k_norm(k), rotation), v

    def forward(self, entering: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        q = self._heads(self.q_proj(entering))
        q = _rotate(q if self.q_norm is None else self.q_norm(q), rotation)
        k, v = self.keys_values(entering, rotation)
        attended = plan.run(self._index, q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), self._spec)
        output: Tensor = self.o_proj(attended.flatten(1))
        return output

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self._head_dim)


class Mlp(nn.Module):
    """Llama's gated feed-forward network."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return output


def _check(config: Any) -> None:
    """Raise ModelLoadError for what transformers' classes allow and these layers don't compute."""
    rope = config.rope_parameters
    refused = [
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope.get("rope_type"), _ROPE_TYPES),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
        ("num_attention_heads over num_key_value_heads", config.num_attention_heads % config.num_key_value_heads, (0,)),
    ]
    for name, value, allowed in refused:
        if value not in allowed:
            known = " or ".join(map(str, allowed))
            raise ModelLoadError(f"{name} is {value}, but must be {known} in a head: use another draft.")


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or []
    sliding = [i < len(kinds) and kinds[i] == "sliding_attention" for i in range(layers)]
    return tuple(config.sliding_window if slides else None for slides in sliding)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
