"""The public dialects of EAGLE3 checkpoints: who writes them, and where they differ in what they mean.

Owns which `architectures` belong to which dialect, how each counts the target's layers, and its names of tensors.
Invariant: a checkpoint of an unknown architecture is refused rather than guessed at. Used by
`cluster.speculation.eagle3_config` and `eagle3_model`.

The heads of all dialects compute the same. What is easily mixed up is the layer count: the same three target states
are [2, 16, 29] to one and [1, 15, 28] to the other, and a head that reads the neighbouring layers still drafts, badly.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from cluster.errors import ModelLoadError
from cluster.speculation.draft_folder import check_architecture

_AUX_KEY = "eagle_aux_hidden_state_layer_ids"


class LayerCount(Enum):
    """What an index of a target layer names, as an offset to transformers' `hidden_states` (0 is the embedding)."""

    HIDDEN_STATES = 0
    LAYER_OUTPUTS = 1


@dataclass(frozen=True, slots=True)
class Dialect:
    """`top_level` and `nested` say how layers are counted in the document itself and in its `eagle_config`.

    `one_layer`: there is one layer whatever `num_hidden_layers` says, which is often the target's. `skips_equal_fc`:
    states as wide as the head are not projected.
    """

    name: str
    architectures: tuple[str, ...]
    top_level: LayerCount = LayerCount.HIDDEN_STATES
    nested: LayerCount = LayerCount.LAYER_OUTPUTS
    one_layer: bool = False
    skips_equal_fc: bool = False


# speculators' own code counts `hidden_states`; SGLang and TensorRT-LLM, for which the others were made, layer outputs.
SPECULATORS = Dialect("speculators", ("Eagle3Speculator", "Eagle3DraftModel", "PEagleSpeculator", "PEagleDraftModel"))
SPECFORGE = Dialect("specforge", ("LlamaForCausalLMEagle3",))  # ModelOpt's too
ANGELSLIM = Dialect("angelslim", ("Eagle3LlamaForCausalLM",), one_layer=True)
OFFICIAL = Dialect("official", ("LlamaForCausalLM",), one_layer=True, skips_equal_fc=True)

_DIALECTS = (SPECULATORS, SPECFORGE, ANGELSLIM, OFFICIAL)
_BY_ARCHITECTURE = {name: dialect for dialect in _DIALECTS for name in dialect.architectures}

_RENAMED = (
    (re.compile(r"^model\."), ""),  # NeMo and SGLang
    (re.compile(r"^(?:midlayer|midlayers\.0)\."), "layers.0."),
    (re.compile(r"^(layers\.[1-9]\d*)\.hidden_norm\."), r"\1.input_layernorm."),  # SGLang, where there are more layers
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),  # SGLang, in older checkpoints
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)
# What a head doesn't need of a checkpoint: `t2d` follows from `d2t`, the rest are the target's or computed.
_UNUSED = re.compile(r"^(t2d|rotary_emb\..*|.*\.rotary_emb\..*|verifier_.*)$")


def dialect_of(folder: Path, document: dict[str, Any]) -> Dialect:
    """The dialect of a checkpoint. Raises ModelLoadError for an unknown architecture."""
    dialect = _BY_ARCHITECTURE[check_architecture(folder, document, "EAGLE3 head", _BY_ARCHITECTURE)]
    if dialect is OFFICIAL and not document.get("draft_vocab_size"):
        raise ModelLoadError(
            f"{folder}/config.json has no draft_vocab_size, so it is an ordinary model's or an EAGLE-1 head's: "
            "set the speculation method to draft_model or eagle."
        )
    return dialect


def named_layers(dialect: Dialect, document: dict[str, Any]) -> tuple[tuple[int, ...], LayerCount] | None:
    """The target layers that the document names, and how it counts them; None if it names none."""
    nested = document.get("eagle_config") or {}
    for given, count in ((document.get(_AUX_KEY), dialect.top_level), (nested.get(_AUX_KEY), dialect.nested)):
        if given:
            return tuple(int(layer) for layer in given), count
    return None


def with_our_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint of any dialect under the names that `Eagle3Head` has for them."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, replacement in _RENAMED:
            name = pattern.sub(replacement, name)
        if not _UNUSED.match(name):
            # P-EAGLE's mask state is written with one or two leading dimensions.
            renamed[name] = tensor.flatten() if name == "mask_hidden" else tensor
    return renamed
