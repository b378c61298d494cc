"""Rotary position embedding of the heads: the angles of each position, and turning queries and keys by them.

Invariant: frequencies are float32 whatever the type of the weights, and depend on the configuration alone, never on a
sequence's length. Used by `decoder_shape`, which refuses parameters that give no angles, and by the heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from cluster.errors import ModelLoadError

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, 1, head_dim] of the rows' positions."""


class Rotary:
    """Angles of any kind that transformers knows. No module, so that converting a head leaves them in float32.

    Raises `ModelLoadError` for parameters that give none.
    """

    def __init__(self, head_dim: int, max_positions: int, parameters: dict[str, Any]) -> None:
        config = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rope_parameters=parameters,
        )
        try:
            with torch.device("cpu"):  # also where a head is built on the meta device
                angles: Any = LlamaRotaryEmbedding(config)
        except (ArithmeticError, LookupError, TypeError, ValueError, RuntimeError) as error:
            raise _no_angles(parameters, str(error)) from None
        self._frequencies: Tensor = angles.inv_freq
        self._scale: float = angles.attention_scaling
        if not self._frequencies.isfinite().all():
            raise _no_angles(parameters, "some are infinite")

    def __call__(self, like: Tensor, positions: Tensor) -> Rotation:
        """For `positions` [T], in the type and on the device of `like`."""
        self._frequencies = self._frequencies.to(like.device)
        angles = positions.float().view(-1, 1, 1) * self._frequencies
        cos, sin = (torch.cat([half, half], dim=-1) for half in (angles.cos(), angles.sin()))
        if self._scale != 1:
            cos, sin = cos * self._scale, sin * self._scale
        return cos.to(like.dtype), sin.to(like.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys `x` [T, heads, head_dim], turned."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def _no_angles(parameters: dict[str, Any], reason: str) -> ModelLoadError:
    return ModelLoadError(f"no rotary angles come of {parameters} ({reason}): use a complete checkpoint.")
