"""The decoder layer that heads over hidden states are made of: Llama's, or Qwen3's with its norms of queries and keys.

Owns the layer's arithmetic over packed rows. Invariant: module names are those of the public checkpoints, and attention
goes through the plan that is given. Used by the heads of the modes that read the target's hidden states.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, silu

from cluster.engine.attention import AttentionPlan, AttentionSpec
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.rotary import Rotation, rotate


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
        return rotate(k if self.k_norm is None else self.k_norm(k), rotation), v

    def forward(self, entering: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        q = self._heads(self.q_proj(entering))
        q = rotate(q if self.q_norm is None else self.q_norm(q), rotation)
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
