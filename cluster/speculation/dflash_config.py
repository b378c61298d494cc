"""What a DFlash checkpoint's `config.json` says, in one frozen shape for both of its public dialects.

Invariant: `target_layers` are indices into transformers' `hidden_states` (0 is the embedding's output, i is the output
of layer i - 1). z-lab's checkpoints count layer outputs (`dflash_config.target_layer_ids`), those of the "speculators"
library count hidden states (`aux_hidden_state_layer_ids`). Used by `cluster.speculation.dflash_model`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cluster.errors import ModelLoadError
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.draft_folder import check_architecture, read_draft_config

_ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")


@dataclass(frozen=True)
class DFlashConfig:
    """Shape of a DFlash draft: plain decoder layers over the states of `target_layers`.

    `block_size` counts the anchor and the masks of a query block. `drafts_from_anchor`: the anchor's own row drafts the
    first token; otherwise mask j drafts token j. A sliding window counts back from each query, as in other engines;
    `causal_windows`: layers that have one see the block causally.
    """

    layer: DecoderShape
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    target_layers: tuple[int, ...]
    mask_token: int
    block_size: int
    drafts_from_anchor: bool = False
    causal_windows: bool = False

    @property
    def most_drafts(self) -> int:
        """Tokens that a whole block drafts."""
        return self.block_size - (0 if self.drafts_from_anchor else 1)

    @classmethod
    def from_folder(cls, folder: Path, target_layers: int) -> DFlashConfig:
        """Reads `folder/config.json`, for a target of so many layers.

        Raises ModelLoadError if it is missing, or describes something else than a DFlash draft that can be computed.
        """
        document = read_draft_config(folder)
        check_architecture(folder, document, "DFlash draft", _ARCHITECTURES)
        try:
            config = _speculators(document) if "speculators_model_type" in document else _z_lab(document, target_layers)
        except ModelLoadError as error:
            raise ModelLoadError(f"The DFlash draft in {folder} can't be used: {error}") from None
        except (KeyError, TypeError, ValueError) as error:
            raise ModelLoadError(
                f"{folder}/config.json lacks or misstates field {error}: use a complete DFlash checkpoint."
            ) from None
        _check(config, folder)
        return config


def _z_lab(document: dict[str, Any], target_layers: int) -> DFlashConfig:
    own = document.get("dflash_config") or {}
    layer = replace(DecoderShape.from_document(document), qk_norm=True)
    outputs = own.get("target_layer_ids") or _default_outputs(target_layers, layer.num_layers)
    vocab_size = int(document["vocab_size"])
    return DFlashConfig(
        layer=layer,
        vocab_size=vocab_size,
        draft_vocab_size=int(document.get("draft_vocab_size") or vocab_size),
        target_hidden_size=int(document.get("target_hidden_size") or layer.hidden_size),
        target_layers=tuple(int(i) + 1 for i in outputs),
        mask_token=int(_either(own, document, "mask_token_id")),
        block_size=int(_either(own, document, "block_size")),
        causal_windows=bool(own.get("causal", False)),
    )


def _speculators(document: dict[str, Any]) -> DFlashConfig:
    decoder = document["transformer_layer_config"]
    layer = replace(DecoderShape.from_document(decoder), qk_norm=True)
    vocab_size = int(decoder["vocab_size"])
    return DFlashConfig(
        layer=layer,
        vocab_size=vocab_size,
        draft_vocab_size=int(document.get("draft_vocab_size") or vocab_size),
        target_hidden_size=int(document.get("target_hidden_size") or layer.hidden_size),
        target_layers=tuple(int(i) for i in document["aux_hidden_state_layer_ids"]),
        mask_token=int(document["mask_token_id"]),
        block_size=int(document["block_size"]),
        drafts_from_anchor=bool(document.get("sample_from_anchor", False)),
        causal_windows=not document.get("sliding_window_non_causal", True),
    )


def _either(own: dict[str, Any], document: dict[str, Any], key: str) -> Any:
    return own[key] if key in own else document[key]


def _default_outputs(target_layers: int, draft_layers: int) -> list[int]:
    """The layers that z-lab's code takes where a checkpoint names none: spread from the second to the last but two."""
    if draft_layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (draft_layers - 1)) for i in range(draft_layers)]


def _check(config: DFlashConfig, folder: Path) -> None:
    must = [
        ("mask_token_id", config.mask_token, 0, config.vocab_size - 1),
        ("block_size", config.block_size, 1 if config.drafts_from_anchor else 2, config.layer.max_positions),
        ("draft_vocab_size", config.draft_vocab_size, 1, config.vocab_size),
        ("the first target layer", min(config.target_layers, default=-1), 0, max(config.target_layers, default=0)),
    ]
    for name, value, least, most in must:
        if not least <= value <= most:
            raise ModelLoadError(
                f"In {folder}/config.json {name} is {value}, but must be {least} to {most}: use a complete checkpoint."
            )
