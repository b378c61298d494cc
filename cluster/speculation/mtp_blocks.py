"""The decoder layers inside MTP layers, made by transformers from the architecture that a folder's configuration names.

A model of that architecture, of as many layers as there are MTP layers and with next to no vocabulary, is loaded from
the tensors: transformers converts names and fuses experts as it does for the target. Invariant: layer k of it calls
attention as layer k, through the plan that is given. Used by `cluster.speculation.mtp_model`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cluster.engine.attention import TANDEM_PAGED, AttentionPlan
from cluster.errors import ModelLoadError

# Architectures that transformers lacks, and the one that their decoder layers are equal to.
_STAND_INS = {"mimo": "qwen2"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class MtpBlocks:
    """`layers` of one architecture, its norm's class, and its rotary embedding."""

    layers: tuple[nn.Module, ...]
    norm: type[nn.Module]
    rotary: nn.Module
    config: Any

    def run(self, k: int, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """Decoder layer `k` over `hidden` [T, H] at `positions` [T] -> [T, H]."""
        at = positions[None]
        kind = {"layer_type": self.config.layer_types[k]} if _angles_by_type(self.config) else {}
        angles = self.rotary(hidden[None], at, **kind)
        output: Any = self.layers[k](
            hidden[None], attention_mask=None, position_embeddings=angles, position_ids=at, paged=plan
        )
        rows: Tensor = (output[0] if isinstance(output, tuple) else output)[0]
        return rows


def read_architecture(folder: Path, document: Mapping[str, Any]) -> Any:
    """The text configuration of `document`, a folder's config.json. Raises ModelLoadError if it names no known one."""
    kind = document.get("model_type")
    fields = {name: value for name, value in document.items() if name not in ("model_type", "auto_map")}
    try:
        if kind in _STAND_INS:
            return CONFIG_MAPPING[_STAND_INS[kind]](**fields)
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).get_text_config()
    except Exception as error:  # transformers raises whatever the document makes it stumble over
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelLoadError(
            f"{folder}/config.json names model_type {kind}, whose MTP layers can't be built ({reason}): "
            "use a checkpoint of a known family or another speculation method."
        ) from None


def load_blocks(folder: Path, config: Any, tensors: Mapping[str, Tensor], layers: int, sliding: bool) -> MtpBlocks:
    """`layers` decoder layers out of `tensors`, which are named `{k}.{name within the layer}`, in their type.

    `sliding`: the family's MTP layers slide where its configuration doesn't say. Raises ModelLoadError for tensors that
    are missing or have another shape.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelLoadError(
            f"{folder}/config.json names model_type {config.model_type}, of which transformers has no causal language "
            "model: use another speculation method."
        )
    small = _as_mtp(config, layers, sparse=any(".experts." in name for name in tensors), sliding=sliding)
    dtype = next(iter(tensors.values())).dtype
    try:
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(small)]
        model, info = architecture.from_pretrained(
            None,
            config=small,
            state_dict={f"model.layers.{name}": tensor for name, tensor in tensors.items()} | _rest(small, dtype),
            dtype=dtype,
            attn_implementation=TANDEM_PAGED,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise ModelLoadError(
            f"The MTP layers in {folder} can't be built ({reason}): use a complete checkpoint."
        ) from None
    _check(folder, info)
    decoder: Any = model.get_decoder()
    return MtpBlocks(tuple(decoder.layers), type(decoder.norm), decoder.rotary_emb, small)


def _rest(config: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """What such a model has besides its layers, and nobody uses."""
    matrix, vector = torch.zeros(config.vocab_size, config.hidden_size), torch.zeros(config.hidden_size)
    named = {"model.embed_tokens.weight": matrix, "lm_head.weight": matrix, "model.norm.weight": vector}
    return {name: tensor.to(dtype, copy=True) for name, tensor in named.items()}


def _check(folder: Path, info: Mapping[str, Any]) -> None:
    wrong = {
        "lack": [name for name in info["missing_keys"] if ".layers." in name],
        "misshape": [str(entry[0]) for entry in info["mismatched_keys"]],
        "have no place for": [name for name in info["unexpected_keys"] if ".layers." in name],
    }
    for how, names in wrong.items():
        if names:
            raise ModelLoadError(
                f"The MTP layers in {folder} {how} tensor {min(names).partition('layers.')[2]}: use a complete, "
                "unquantised checkpoint whose config.json belongs to it."
            )


def _as_mtp(config: Any, layers: int, sparse: bool, sliding: bool) -> Any:
    """`config` for a model of MTP layers alone. Which of its layers have experts, or slide, was said of the target's
    layers by number, in one of several ways."""
    small = copy.deepcopy(config)
    kinds = getattr(config, "mtp_layer_types", None)
    changes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "vocab_size": 8,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "layer_types": list(kinds or [_SLIDING if sliding else _FULL] * layers)[:layers],
        "mlp_layer_types": ["sparse" if sparse else "dense"] * layers,
        "first_k_dense_replace": 0 if sparse else layers,
        "moe_layer_start_index": 0 if sparse else layers,
        "moe_layer_end_index": layers,
        "moe_layer_interval": 1,
        "mlp_only_layers": [] if sparse else list(range(layers)),
        "decoder_sparse_step": 1,
        "per_layer_config": getattr(config, "mtp_per_layer_config", None),
    }
    for name, value in changes.items():
        if hasattr(small, name):
            setattr(small, name, value)
    return small


def _angles_by_type(config: Any) -> bool:
    parameters = getattr(config, "rope_parameters", None) or {}
    return bool(parameters) and all(isinstance(value, dict) for value in parameters.values())
