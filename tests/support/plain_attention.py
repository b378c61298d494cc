"""Causal attention over one whole sequence, without any cache: the plan that tests compare paged heads with."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from cluster.engine.attention import AttentionSpec


class WholeSequence:
    """An `AttentionPlan` whose every run sees the whole sequence anew."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """`[heads, T, dim]` and `[kv_heads, T, dim]` in, `[T, heads, dim]` out; nothing is stored."""
        attended = scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=spec.scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)
