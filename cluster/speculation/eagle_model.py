"""The head of EAGLE-1 and EAGLE-2, which share their weights: decoder layers over a token and the target's last state.

Owns: the head's arithmetic and how a checkpoint becomes one. Invariant: module names equal the tensor names of the
official checkpoints, so a state dict is a checkpoint. It is a `cluster.speculation.recurrent.HiddenHead`.

Source: EAGLE (Li et al., 2024) and its `cnets1.py`. With t the tokens and H_i the target's last state at position i,
after the final norm, row i is fed fc([E(t_{i+1}), H_i]); the first layer norms nothing before its attention, its
output goes to the target's output matrix as it is, and is what a later draft step is fed in place of H_i.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cluster.engine.attention import AttentionPlan
from cluster.engine.kv_tensors import KvLayout
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.decoder_layer import Attention, Mlp, Norm
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.draft_folder import check_architecture, read_draft_config
from cluster.speculation.draft_tensors import fill, read_draft_tensors
from cluster.speculation.rotary import Rotation

_WHAT = "EAGLE head"
_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM")
_UNUSED = re.compile(r"(.*\.)?rotary_emb\..*")


@dataclass(frozen=True)
class EagleConfig:
    """Shape of an EAGLE head: `hidden_layer` is the target's last, as an index into transformers' `hidden_states`."""

    layer: DecoderShape
    vocab_size: int
    hidden_layer: int
    fc_bias: bool = False


class EagleHead(nn.Module):
    """An EAGLE head over matrices [vocab, H] that it never saves: the target's, or the checkpoint's own."""

    token_embedding: Tensor
    output_matrix: Tensor

    def __init__(self, config: EagleConfig, borrowed: BorrowedWeights) -> None:
        super().__init__()
        self.config = config
        width = config.layer.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=config.fc_bias)
        self.layers = nn.ModuleList(_Layer(config.layer, index) for index in range(config.layer.num_layers))
        self.rotary = config.layer.rotary()
        self.register_buffer("token_embedding", borrowed.embedding, persistent=False)
        self.register_buffer("output_matrix", borrowed.output, persistent=False)

    @property
    def kv_layout(self) -> KvLayout:
        """One cache of the config's KV heads for each layer."""
        return self.config.layer.layout(self.fc.weight.dtype)

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's last state, after its final norm."""
        return (self.config.hidden_layer,)

    @property
    def max_positions(self) -> int:
        """Positions that the head can hold."""
        return self.config.layer.max_positions

    @property
    def target_ids(self) -> None:
        """None: the head drafts the target's own ids."""
        return None

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    def combine(self, states: Tensor) -> Tensor:
        """The states [T, H] as they are."""
        return states

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """One draft step: `token_ids` [T], `hidden` [T, H], `positions` [T] -> feedback [T, H]."""
        embedded = embedding(token_ids, self.token_embedding).to(hidden.dtype)
        entering: Tensor = self.fc(torch.cat([embedded, hidden], dim=-1))
        rotation = self.rotary(entering, positions)
        for layer in self.layers:
            entering = layer(entering, rotation, plan)
        return entering

    def logits(self, feedback: Tensor) -> Tensor:
        """Draft logits [R, vocab] of `forward`'s output [R, H]."""
        return linear(feedback, self.output_matrix.to(feedback.dtype))

    @classmethod
    def load(
        cls,
        folder: Path,
        borrowed: BorrowedWeights,
        dtype: torch.dtype,
        target_layers: int,
        allow_pickle: bool = False,
    ) -> EagleHead:
        """Loads the checkpoint in `folder` in `dtype`, ready for inference; matrices that it lacks are `borrowed`.

        Raises `ModelLoadError` for another kind of draft, or naming the tensor that is missing or doesn't fit.
        """
        document = read_draft_config(folder)
        check_architecture(folder, document, _WHAT, _ARCHITECTURES)
        if document.get("draft_vocab_size"):
            raise ModelLoadError(f"{folder} holds an EAGLE3 head, but the method is eagle: set it to eagle3.")
        tensors = {
            name.removeprefix("model."): tensor
            for name, tensor in read_draft_tensors(folder, allow_pickle=allow_pickle).items()
            if not _UNUSED.match(name)
        }
        config = _config(folder, document, target_layers, fc_bias="fc.bias" in tensors)
        matrices = [
            _matrix(config, folder, name, tensors.pop(name, None), lent).to(dtype)
            for name, lent in (("embed_tokens.weight", borrowed.embedding), ("lm_head.weight", borrowed.output))
        ]
        with torch.device("meta"):
            head = cls(config, BorrowedWeights(*matrices))
        fill(head, tensors, _WHAT, folder)
        return head.to(dtype).eval().requires_grad_(False)


class _Layer(nn.Module):
    """A Llama decoder layer, the first one without its first norm."""

    def __init__(self, shape: DecoderShape, index: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps) if index else nn.Identity()
        self.self_attn = Attention(shape, shape.hidden_size, index)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, hidden: Tensor, rotation: Rotation, plan: AttentionPlan) -> Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotation, plan)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


def _config(folder: Path, document: dict[str, Any], target_layers: int, fc_bias: bool) -> EagleConfig:
    """`fc_bias` holds where the document is silent, as the official code takes either."""
    try:
        return EagleConfig(
            layer=DecoderShape.from_document(document),
            vocab_size=int(document["vocab_size"]),
            hidden_layer=target_layers,
            fc_bias=bool(document.get("bias", fc_bias)),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"The {_WHAT} in {folder} can't be used: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{folder}/config.json lacks or misstates field {error}: use a complete EAGLE checkpoint."
        ) from None


def _matrix(config: EagleConfig, folder: Path, name: str, own: Tensor | None, lent: Tensor) -> Tensor:
    """The checkpoint's own matrix, or else the target's, whose rows may differ by padding."""
    given, width = lent if own is None else own, config.layer.hidden_size
    if given.shape[1:] != (width,) or (own is not None and len(own) != config.vocab_size):
        owner = "the target's" if own is None else "its own"
        raise ModelLoadError(
            f"The {_WHAT} in {folder} expects {name} of shape {(config.vocab_size, width)}, but {owner} is "
            f"{tuple(given.shape)}: use the draft that was trained for this target."
        )
    return given
