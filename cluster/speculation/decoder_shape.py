"""What a checkpoint's `config.json` says about the decoder layers of a head: Llama's, or Qwen3's.

Invariant: a shape describes layers that `decoder_layer` computes exactly; anything else is refused in one sentence.
Used by the configurations of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from cluster.engine.kv_tensors import KvLayout, LayerKv
from cluster.errors import ModelLoadError
from cluster.speculation.rotary import Rotary

_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
# The others ("dynamic", "longrope") turn by angles that change with the length, so KV couldn't be reused.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_hidden_layers",
    "max_position_embeddings",
    "vocab_size",
)
_LARGEST = 1 << 24


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
        shape = cls(
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
        shape.rotary()
        return shape

    def rotary(self) -> Rotary:
        """The angles of these layers' positions."""
        return Rotary(self.head_dim, self.max_positions, self.rope_parameters)

    def layout(self, dtype: torch.dtype) -> KvLayout:
        """The cache of these layers."""
        return KvLayout((LayerKv(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers, dtype)


def check_sizes(**sizes: int) -> None:
    """Raise ModelLoadError for a size that no draft has: nothing may be built from a damaged one."""
    for name, size in sizes.items():
        if not isinstance(size, int) or not 1 <= size <= _LARGEST:
            raise ModelLoadError(f"{name} is {size}, but must be 1 to {_LARGEST}: use a complete checkpoint.")


def _check(config: Any) -> None:
    """Raise ModelLoadError for what transformers' classes allow and these layers don't compute."""
    check_sizes(**{name: getattr(config, name) for name in _SIZES})
    if not 0 < config.rms_norm_eps < 1:
        raise ModelLoadError(f"rms_norm_eps is {config.rms_norm_eps}, but must be above 0 and below 1: fetch it again.")
    rope, heads = config.rope_parameters, config.num_attention_heads
    refused = [
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope.get("rope_type"), _ROPE_TYPES),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
        ("head_dim modulo 2", config.head_dim % 2, (0,)),
        ("num_attention_heads modulo num_key_value_heads", heads % config.num_key_value_heads, (0,)),
    ]
    for name, value, allowed in refused:
        if value not in allowed:
            known = " or ".join(map(str, allowed))
            raise ModelLoadError(f"{name} is {value}, but must be {known} in a head: use another draft.")


def _windows(config: Any, layers: int) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or []
    sliding = [i < len(kinds) and kinds[i] == "sliding_attention" for i in range(layers)]
    return tuple(config.sliding_window if slides else None for slides in sliding)
