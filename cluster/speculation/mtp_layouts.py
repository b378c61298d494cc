"""How the families of models lay multi-token-prediction layers out in their checkpoints, and one set of names for all.

An MTP layer k (counted from 0) is a decoder layer over eh_proj([enorm(E(token)), hnorm(state)]), then perhaps a norm
and an output matrix of its own. transformers drops these tensors when it loads a target, so they are read from the
checkpoint itself. Invariant: what a layout doesn't know of an MTP layer belongs to its decoder layer, and what isn't
of an MTP layer is never read. Used by `cluster.speculation.mtp_model`.

Sources: the published checkpoints of DeepSeek-V3, GLM-4.5, Step-3.5, Qwen3-Next, Qwen3.5, MiMo, MiMo-V2 and ERNIE 4.5,
and their loaders in vLLM.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

BLOCK = "block."
"""Prefix of the tensors of the decoder layer, under the names that they have in a layer of the target."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """`layer` matches a layer's tensors, with groups `k` and `rest`; `extra` those that lie elsewhere.

    `names` gives the common name of each `rest` that isn't the decoder layer's: enorm, hnorm, eh_proj, norm (after the
    layer), head and embedding. In `extra`, a pattern has a group `k` if there is one for each layer; else all share it.
    `hidden_first`: the projection's columns begin with those of the state. `renames` are parts of the decoder layer
    that are called otherwise than in the target's layers. `first_is_depth`: layers count on from the target's own.
    """

    family: str
    layer: re.Pattern[str]
    names: Mapping[str, str]
    extra: Mapping[str, str] = field(default_factory=dict)
    renames: Mapping[str, str] = field(default_factory=dict)
    hidden_first: bool = False
    first_is_depth: bool = False
    sliding: bool = False

    def place(self, name: str, target_layers: int) -> tuple[int | None, str] | None:
        """(layer, common name) of a checkpoint's tensor; layer None if all layers share it, None if it isn't MTP's."""
        for pattern, common in self.extra.items():
            found = re.fullmatch(pattern, name)
            if found:
                return (int(found["k"]) if "k" in found.groupdict() else None), common
        found = self.layer.fullmatch(name)
        if not found:
            return None
        k, rest = int(found["k"]) - (target_layers if self.first_is_depth else 0), found["rest"]
        if k < 0:
            return None
        if rest in self.names:
            return k, self.names[rest]
        for theirs, ours in self.renames.items():
            rest = rest.replace(theirs, ours)
        return k, BLOCK + rest


_DEEPSEEK_NAMES = {
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "norm.weight",
    "shared_head.head.weight": "head.weight",
    "shared_head.output.weight": "head.weight",  # Step-3.5
    "embed_tokens.weight": "embedding.weight",
}

_LAYOUTS = (
    MtpLayout(
        "DeepSeek-V3, GLM-4.5 or Step-3.5",
        re.compile(r"model\.layers\.(?P<k>\d+)\.(?:transformer\.)?(?P<rest>.+)"),
        _DEEPSEEK_NAMES,
        first_is_depth=True,
    ),
    MtpLayout(
        "Qwen3-Next or Qwen3.5",
        re.compile(r"mtp\.layers\.(?P<k>\d+)\.(?P<rest>.+)"),
        {},
        extra={
            r"mtp\.pre_fc_norm_embedding\.weight": "enorm.weight",
            r"mtp\.pre_fc_norm_hidden\.weight": "hnorm.weight",
            r"mtp\.fc\.weight": "eh_proj.weight",
            r"mtp\.norm\.weight": "norm.weight",
            r"mtp\.embed_tokens\.weight": "embedding.weight",
            r"mtp\.lm_head\.weight": "head.weight",
        },
    ),
    MtpLayout(
        "MiMo",
        re.compile(r"model\.mtp_layers\.(?P<k>\d+)\.(?P<rest>.+)"),
        {
            "token_layernorm.weight": "enorm.weight",
            "hidden_layernorm.weight": "hnorm.weight",
            "input_proj.weight": "eh_proj.weight",
            "final_layernorm.weight": "norm.weight",
        },
        hidden_first=True,
    ),
    MtpLayout(
        "MiMo-V2",
        re.compile(r"model\.mtp\.layers\.(?P<k>\d+)\.(?P<rest>.+)"),
        {**_DEEPSEEK_NAMES, "final_layernorm.weight": "norm.weight"},
        renames={"pre_mlp_layernorm.": "post_attention_layernorm."},
        sliding=True,
    ),
    MtpLayout(
        "ERNIE 4.5",
        re.compile(r"model\.mtp_block\.(?P<k>\d+)\.(?P<rest>.+)"),
        {},
        extra={
            r"model\.mtp_emb_norm\.(?P<k>\d+)\.weight": "enorm.weight",
            r"model\.mtp_hidden_norm\.(?P<k>\d+)\.weight": "hnorm.weight",
            r"model\.mtp_linear_proj\.(?P<k>\d+)\.weight": "eh_proj.weight",
        },
    ),
)


def find_layout(names: Collection[str], target_layers: int) -> MtpLayout | None:
    """The layout that some of these tensors are in; None if none of them is an MTP layer's."""
    for layout in _LAYOUTS:
        if any((place := layout.place(name, target_layers)) and place[1] == "eh_proj.weight" for name in names):
            return layout
    return None
