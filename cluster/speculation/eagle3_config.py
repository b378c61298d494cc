"""What an EAGLE3 checkpoint's `config.json` says, in one frozen shape whatever its dialect.

Owns: the dialects of `config.json` (speculators, official EAGLE, nvidia/SpecForge) and their two conventions for
naming target layers. Invariant: `aux_layer_ids` are indices into transformers' `hidden_states` (0 is the embedding's
output, i is the output of layer i - 1), already translated from the checkpoint's own convention. Used by
`cluster.speculation.eagle3_model`, by the drafter and by the trainer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.errors import ModelLoadError

_UNSUPPORTED_FLAGS = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE3 head: one fused decoder layer (more are plain ones) over states of `aux_layer_ids`."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    num_layers: int = 1
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    norm_before_residual: bool = False

    @classmethod
    def from_folder(cls, folder: Path, target_layers: int | None = None) -> Eagle3Config:
        """Reads `folder/config.json`; `target_layers` is needed only for checkpoints that don't name their aux layers.

        Raises `ModelLoadError` if the file is missing, malformed, or describes a variant that can't be run.
        """
        path = folder / "config.json"
        try:
            document = json.loads(path.read_text())
        except FileNotFoundError:
            raise ModelLoadError(
                f"EAGLE3 folder {folder} has no config.json; point to a complete checkpoint."
            ) from None
        except ValueError as error:
            raise ModelLoadError(f"{path} is not valid JSON ({error}); fetch the checkpoint again.") from error
        try:
            return cls.from_dict(document, target_layers)
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"{path} lacks or misstates field {error}; use a complete EAGLE3 checkpoint."
            ) from error

    @classmethod
    def from_dict(cls, document: dict[str, Any], target_layers: int | None = None) -> Eagle3Config:
        """Translates any known dialect. Raises `KeyError` for a missing field, `ModelLoadError` for a refused one."""
        for flag in _UNSUPPORTED_FLAGS:
            if document.get(flag):
                raise ModelLoadError(f"EAGLE3 flag {flag} is set but not supported; use a checkpoint without it.")
        llama = document.get("transformer_layer_config") or document
        hidden, heads = int(llama["hidden_size"]), int(llama["num_attention_heads"])
        vocab = int(llama["vocab_size"])
        return cls(
            hidden_size=hidden,
            intermediate_size=int(llama["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(llama.get("num_key_value_heads") or heads),
            head_dim=int(llama.get("head_dim") or hidden // heads),
            vocab_size=vocab,
            draft_vocab_size=int(document.get("draft_vocab_size") or vocab),
            target_hidden_size=int(document.get("target_hidden_size") or hidden),
            aux_layer_ids=_aux_layer_ids(document, target_layers),
            num_layers=int(llama.get("num_hidden_layers", 1)),
            rms_norm_eps=float(llama.get("rms_norm_eps", 1e-5)),
            max_position_embeddings=int(llama.get("max_position_embeddings", 2048)),
            rope_parameters=_rope_parameters(llama),
            norm_before_residual=bool(document.get("norm_before_residual", False)),
        )


def default_aux_layer_ids(target_layers: int) -> tuple[int, int, int]:
    """The layers of the official recipe for a target of `target_layers` layers, as `hidden_states` indices.

    Source: EAGLE's `modeling_llama_kv.py`: the states that enter layers 2, n // 2 and n - 3.
    """
    low, middle, high = 2, target_layers // 2, target_layers - 3
    if not low < middle < high:  # a target of fewer than eight layers: spread over what there is
        low, middle, high = 1, max(2, target_layers // 2), max(3, target_layers - 1)
    return low, middle, high


def _aux_layer_ids(document: dict[str, Any], target_layers: int | None) -> tuple[int, ...]:
    ids = document.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        return tuple(int(i) for i in ids)
    eagle = document.get("eagle_config") or {}
    if eagle.get("use_aux_hidden_state") is False:
        raise ModelLoadError("EAGLE3 flag use_aux_hidden_state is false but only heads over aux states are supported.")
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if ids:
        # This dialect counts layers by their output: the output of layer i is hidden_states[i + 1].
        return tuple(int(i) + 1 for i in ids)
    if target_layers is None:
        raise ModelLoadError("EAGLE3 config names no eagle_aux_hidden_state_layer_ids; add them to config.json.")
    return default_aux_layer_ids(target_layers)


def _rope_parameters(llama: dict[str, Any]) -> dict[str, Any]:
    if llama.get("rope_parameters"):
        return dict(llama["rope_parameters"])
    scaling = dict(llama.get("rope_scaling") or {})
    kind = scaling.pop("type", None) or scaling.pop("rope_type", "default")
    return {**scaling, "rope_type": kind, "rope_theta": float(llama.get("rope_theta", 10000.0))}
