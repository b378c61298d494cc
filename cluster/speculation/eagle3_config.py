"""What an EAGLE3 checkpoint's `config.json` says, in one frozen shape whatever its dialect.

Invariant: `aux_layer_ids` are indices into transformers' `hidden_states` (0 is the embedding's output, i is the output
of layer i - 1), already translated from the checkpoint's own count. Used by `cluster.speculation.eagle3_model` and by
the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ModelLoadError
from cluster.speculation.decoder_shape import DecoderShape, check_sizes
from cluster.speculation.draft_folder import read_draft_config
from cluster.speculation.eagle3_dialects import Dialect, LayerCount, dialect_of, named_layers

# Variants that ModelOpt can train and that no published head uses: flag, and the value that is computed here.
_EAGLE_CONFIG_MUST = {
    "use_input_layernorm_in_first_layer": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE3 head over the states of `aux_layer_ids`: one fused decoder layer, any further ones plain.

    `projects`: the states go through `fc`, normed before it one by one (`fc_norm`) or together (`norm_before_fc`).
    `final_norm`: logits are made of normed outputs; with `norm_output` these are fed back too. `norm_before_residual`:
    the residual is the normed state.
    """

    layer: DecoderShape
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layer_ids: tuple[int, ...]
    projects: bool = True
    fc_bias: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    final_norm: bool = True
    norm_output: bool = False
    norm_before_residual: bool = False
    tied: bool = False
    dialect: str = "speculators"
    counted_as: LayerCount = LayerCount.HIDDEN_STATES

    @classmethod
    def from_folder(cls, folder: Path, target_layers: int | None = None) -> Eagle3Config:
        """Reads `folder/config.json`; `target_layers` is needed only for checkpoints that don't name their aux layers.

        Raises `ModelLoadError` if the file is missing, malformed, or describes a variant that can't be run.
        """
        document = read_draft_config(folder)
        dialect = dialect_of(folder, document)
        try:
            return cls.from_document(dialect, document, target_layers)
        except ModelLoadError as error:
            raise ModelLoadError(f"The EAGLE3 head in {folder} can't be used: {error}") from None
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelLoadError(
                f"{folder}/config.json lacks or misstates field {error}: use a complete EAGLE3 checkpoint."
            ) from None

    @classmethod
    def from_document(
        cls, dialect: Dialect, document: dict[str, Any], target_layers: int | None = None
    ) -> Eagle3Config:
        """Translates a document. Raises `KeyError` for a missing field, `ModelLoadError` for a refused one."""
        llama = document.get("transformer_layer_config") or document
        layer = DecoderShape.from_document(llama, num_layers=1 if dialect.one_layer else None)
        eagle = document.get("eagle_config") or {}
        _refuse_variants(eagle)
        target_hidden = int(document.get("target_hidden_size") or layer.hidden_size)
        uses_aux = bool(eagle.get("use_aux_hidden_state", True))
        layers, count = _aux_layer_ids(dialect, document, target_layers) if uses_aux else (_last(target_layers), None)
        equal_width = len(layers) * target_hidden == layer.hidden_size
        config = cls(
            layer=layer,
            vocab_size=int(llama["vocab_size"]),
            draft_vocab_size=int(document.get("draft_vocab_size") or llama["vocab_size"]),
            target_hidden_size=target_hidden,
            aux_layer_ids=layers,
            projects=uses_aux and not (dialect.skips_equal_fc and equal_width),
            fc_bias=bool(document.get("bias", False)),
            fc_norm=bool(document.get("fc_norm") or document.get("use_aux_norm")),
            norm_before_fc=bool(eagle.get("norm_before_fc", document.get("norm_before_fc", False))),
            final_norm=bool(eagle.get("use_last_layernorm", True)),
            norm_output=bool(document.get("norm_output", False)),
            norm_before_residual=bool(document.get("norm_before_residual", False)),
            tied=bool(llama.get("tie_word_embeddings", False)),
            dialect=dialect.name,
            counted_as=count or LayerCount.HIDDEN_STATES,
        )
        _check(config)
        return config


def default_aux_layer_ids(target_layers: int) -> tuple[int, int, int]:
    """The layers of the official recipe for a target of `target_layers` layers, as `hidden_states` indices.

    Source: EAGLE's `modeling_llama_kv.py`: the states that enter layers 2, n // 2 and n - 3.
    """
    low, middle, high = 2, target_layers // 2, target_layers - 3
    if not low < middle < high:  # a target of fewer than eight layers: spread over what there is
        low, middle, high = 1, max(2, target_layers // 2), max(3, target_layers - 1)
    return low, middle, high


def _aux_layer_ids(
    dialect: Dialect, document: dict[str, Any], target_layers: int | None
) -> tuple[tuple[int, ...], LayerCount]:
    named = named_layers(dialect, document)
    if named is not None:
        layers, count = named
        return tuple(layer + count.value for layer in layers), count
    return default_aux_layer_ids(_known(target_layers)), LayerCount.HIDDEN_STATES


def _last(target_layers: int | None) -> tuple[int, ...]:
    return (_known(target_layers),)


def _known(target_layers: int | None) -> int:
    if target_layers is None:
        raise ModelLoadError("its config.json names no target layers, and the target isn't known here: name them.")
    return target_layers


def _refuse_variants(eagle: dict[str, Any]) -> None:
    for flag, must in _EAGLE_CONFIG_MUST.items():
        value = eagle.get(flag)
        if value is not None and value != must:
            raise ModelLoadError(f"eagle_config.{flag} is {value}, but must be {must}: use another checkpoint.")


def _check(config: Eagle3Config) -> None:
    check_sizes(draft_vocab_size=config.draft_vocab_size, target_hidden_size=config.target_hidden_size)
    if min(config.aux_layer_ids) < 0:
        raise ModelLoadError(f"it reads the target's states {config.aux_layer_ids}, but the first is 0: name others.")
    if config.fc_norm and config.norm_before_fc:
        raise ModelLoadError("fc_norm and norm_before_fc are both set, but exclude each other: set one.")
    width = len(config.aux_layer_ids) * config.target_hidden_size
    if not config.projects and width != config.layer.hidden_size:
        raise ModelLoadError(
            f"it takes states of width {width} as they are, but its hidden_size is {config.layer.hidden_size}: "
            "use the draft that was trained for this target."
        )
    if config.draft_vocab_size > config.vocab_size:
        raise ModelLoadError(
            f"draft_vocab_size is {config.draft_vocab_size}, but must be at most vocab_size, {config.vocab_size}."
        )
