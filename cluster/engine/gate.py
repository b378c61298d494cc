"""The gate a model passes before it is served: is the attention it computes really ours, and is it right?

Some architectures ignore a registered attention function silently, others keep state that isn't a KV cache. So the
gate checks the architecture's flag and layer types, runs a few tokens through a recorder (which also yields the shape
of the KV cache, for any architecture), and compares a paged forward in two pieces with the model's own eager forward.
Called by `cluster.engine.model`; every refusal is a ModelLoadError of one sentence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from cluster.engine.attention import TANDEM_PAGED, AttentionPlan, AttentionSpec, GatherSdpa
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors, LayerKv
from cluster.errors import ModelLoadError

_SERVED_LAYERS = {"full_attention", "sliding_attention"}
_TEST_TOKENS = 23
_TEST_SPLIT = 14
_TEST_BLOCK = 4
# Largest difference of a logit, as a fraction of the largest logit: rounding in float32, and in 16-bit types.
_TOLERANCE = 2e-4
_TOLERANCE_16_BIT = 6e-2


def check_and_measure(model: PreTrainedModel) -> KvLayout:
    """Check `model` (attention set to ours, weights loaded) and return the layout of its KV cache.

    Raises ModelLoadError if it can't be served faithfully.
    """
    _check_architecture(model)
    layout = _record(model)
    _compare_with_eager(model, layout)
    return layout


def check_flag(architecture: Any) -> None:
    """Refuse an architecture that computes its attention by itself."""
    if not getattr(architecture, "_supports_attention_backend", False):
        raise _refusal(architecture.__name__, "does not let its attention be replaced")


def _check_architecture(model: PreTrainedModel) -> None:
    name, config = type(model).__name__, model.config.get_text_config()
    check_flag(type(model))
    if model.config.is_encoder_decoder:
        raise _refusal(name, "is an encoder-decoder")
    unserved = sorted(set(getattr(config, "layer_types", None) or ()) - _SERVED_LAYERS)
    if unserved:
        raise _refusal(name, f"has layers of type {unserved[0]}")


def _refusal(name: str, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{name} {reason}: use a decoder-only model with full or sliding-window attention.")


class ShapeRecorder:
    """An attention plan that computes plain causal attention and notes the shapes that each layer hands over."""

    def __init__(self) -> None:
        self.layers: list[tuple[int, LayerKv, AttentionSpec]] = []

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self.layers.append((layer, LayerKv(key.shape[0], key.shape[2], value.shape[2], spec.window), spec))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(0, 1)


def _record(model: PreTrainedModel) -> KvLayout:
    name, config = type(model).__name__, model.config.get_text_config()
    recorder = ShapeRecorder()
    ids = _test_ids(model)[:, :4]
    try:
        _forward(model, ids, torch.arange(4, device=ids.device)[None], recorder)
    except Exception as error:  # whatever an architecture stumbles over when called in this way
        raise _refusal(name, f"can't run a packed forward ({' '.join(str(error).split())[:200]})") from error
    if [layer for layer, _, _ in recorder.layers] != list(range(config.num_hidden_layers)):
        raise _refusal(name, "does not call the registered attention function once for each of its layers")
    types = getattr(config, "layer_types", None) or ()
    for (layer, _, spec), kind in zip(recorder.layers, types, strict=False):
        if kind == "sliding_attention" and spec.window is None:
            raise _refusal(name, f"does not say how far layer {layer} slides")
    return KvLayout(tuple(shape for _, shape, _ in recorder.layers), model.dtype)


def _compare_with_eager(model: PreTrainedModel, layout: KvLayout) -> None:
    ids = _test_ids(model)
    with _eager(model):
        expected = _forward(model, ids, torch.arange(_TEST_TOKENS, device=ids.device)[None], None)
    blocks = -(-_TEST_TOKENS // _TEST_BLOCK)
    kv = KvTensors(layout, blocks, _TEST_BLOCK, model.device)
    table = tuple(reversed(range(blocks)))
    pieces = []
    for start, end in ((0, _TEST_SPLIT), (_TEST_SPLIT, _TEST_TOKENS)):
        batch = pack([PagedRow(ids[0, start:end].tolist(), start, table)], kv)
        pieces.append(_forward(model, batch.input_ids, batch.positions, GatherSdpa().plan(batch, kv)))
    error = (torch.cat(pieces) - expected).abs().max() / expected.abs().max()
    tolerance = _TOLERANCE if model.dtype.itemsize > 2 else _TOLERANCE_16_BIT
    if not error <= tolerance:  # a NaN fails too
        reason = f"differs from its own eager forward by {error:.1e} of the largest logit ({tolerance:.0e} allowed)"
        raise _refusal(type(model).__name__, reason)


def _test_ids(model: PreTrainedModel) -> Tensor:
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab, (1, _TEST_TOKENS), generator=generator).to(model.device)


@torch.inference_mode()
def _forward(model: PreTrainedModel, ids: Tensor, positions: Tensor, plan: AttentionPlan | None) -> Tensor:
    """Logits `[T, V]`, float32."""
    extra = {} if plan is None else {"paged": plan}
    logits: Tensor = model(input_ids=ids, position_ids=positions, use_cache=False, **extra).logits
    return logits[0].float()


@contextmanager
def _eager(model: PreTrainedModel) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(TANDEM_PAGED)
