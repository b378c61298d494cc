"""A fresh head for a target: its draft vocabulary, its shape and its first weights.

Owns: what a head is before training. The draft vocabulary is made of the tokens that the target itself produces most
often. Where the target is of the Llama family, the head begins as the target's last layer over the target's last aux
state, with the target's final norm and output embedding: a rough guess of the next token from the first step on.
Called by `cluster.training.train`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from cluster.errors import ConfigError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.decoder_layer import Norm
from cluster.speculation.decoder_shape import DecoderShape
from cluster.speculation.eagle3_config import Eagle3Config, default_aux_layer_ids
from cluster.speculation.eagle3_model import Eagle3Head
from cluster.training.samples import Sample


def choose_vocabulary(samples: Iterable[Sample], size: int, vocab_size: int) -> tuple[list[int], float]:
    """The `size` tokens that answers use most, in ascending order, and the share of answer tokens that they cover.

    Tokens that never occur fill the rest in order of their id, which for a byte-pair vocabulary is that of frequency.
    """
    counts = Counter(token for sample in samples for token in sample.tokens[sample.prompt_tokens :])
    ranked = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    chosen = sorted(ranked[:size])
    return chosen, sum(counts[token] for token in chosen) / max(1, counts.total())


def head_config(target: PreTrainedModel, draft_vocab: int, aux_layers: tuple[int, ...] | None) -> Eagle3Config:
    """The shape of a head that takes over the target's own widths.

    Raises `ConfigError` for aux layers that the target doesn't have.
    """
    config = target.config.get_text_config()
    aux_layers = aux_layers or default_aux_layer_ids(config.num_hidden_layers)
    if not all(0 <= layer <= config.num_hidden_layers for layer in aux_layers):
        raise ConfigError(
            f"aux_layers is {aux_layers} but must lie in 0 to {config.num_hidden_layers}, the target's hidden states;"
            " choose among them."
        )
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    layer = DecoderShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_positions=config.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    return Eagle3Config(
        layer=layer,
        vocab_size=config.vocab_size,
        draft_vocab_size=min(draft_vocab, config.vocab_size),
        target_hidden_size=config.hidden_size,
        aux_layer_ids=aux_layers,
    )


def new_head(target: PreTrainedModel, config: Eagle3Config, vocabulary: list[int], seed: int) -> Eagle3Head:
    """A float32 head for `target` that drafts the tokens of `vocabulary` (ascending)."""
    torch.manual_seed(seed)
    borrowed = BorrowedWeights.of(target, torch.float32)
    head = Eagle3Head(config, borrowed.embedding)
    chosen = torch.tensor(vocabulary)
    head.d2t.copy_(chosen - torch.arange(len(vocabulary)))
    with torch.no_grad():
        head.lm_head.weight.copy_(borrowed.output[chosen])
        _pass_through(head, config)
        _take_last_layer(head, target.base_model)
    return head


def _pass_through(head: Eagle3Head, config: Eagle3Config) -> None:
    """Makes `fc` hand on the last of its states, with a little of everything else to learn from."""
    if head.fc is not None:
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -config.target_hidden_size :] += torch.eye(config.layer.hidden_size)


def _take_last_layer(head: Eagle3Head, base: Any) -> None:
    """Copies weights by name where shapes agree; a target with other names leaves the random start as it is."""
    own, theirs = dict(head.layers[0].named_parameters()), dict(base.layers[-1].named_parameters())
    width = head.config.layer.hidden_size
    for name, weight in own.items():
        given = theirs.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
        if given is None:
            continue
        if weight.shape == given.shape:
            weight.copy_(given)
        elif weight.dim() == 2 and weight.shape == (given.shape[0], 2 * width):
            weight[:, :width] *= 0.5  # the embedding's half stays random: the target has nothing like it
            weight[:, width:] = given
    final_norm: Tensor | None = dict(base.named_parameters()).get("norm.weight")
    if final_norm is not None and isinstance(head.norm, Norm) and final_norm.shape == head.norm.weight.shape:
        head.norm.weight.copy_(final_norm)
