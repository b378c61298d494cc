"""MTP layers: each predicts one token further ahead than the layer before it, from that layer's own output.

Owns their arithmetic and how a checkpoint becomes them. With t the tokens and H_i the target's last state at position
i, after its final norm, layer k makes of slot i

    h(k, i) = norm(block(eh_proj([enorm(E(t_{i+1+k})), hnorm(h(k-1, i))]))),    h(-1, i) = H_i

and drafts t_{i+2+k} from it, by its own output matrix or the target's. Layer k reads layer k-1 at the same slot, as in
training, so that what a slot holds depends on tokens 0..i+1+k and on nothing else. `norm` is what the family has after
the layer, if anything: both the logits and the next layer get its output.

Source: DeepSeek-V3 (2024), section 2.2, and transformers' `MtpLayer`. Used by the modes mtp and mtp_eagle.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cluster.engine.attention import AttentionPlan
from cluster.engine.gate import ShapeRecorder
from cluster.engine.kv_tensors import KvLayout
from cluster.errors import ModelLoadError
from cluster.speculation.borrowed import BorrowedWeights
from cluster.speculation.draft_folder import read_draft_config
from cluster.speculation.draft_tensors import draft_tensor_names, read_draft_tensors
from cluster.speculation.mtp_blocks import MtpBlocks, load_blocks, read_architecture
from cluster.speculation.mtp_layouts import BLOCK, MtpLayout, find_layout

_RECORDED = 4


class MtpLayer(nn.Module):
    """What surrounds the decoder layer of MTP layer `k`."""

    embedding: Tensor
    head: Tensor

    def __init__(self, blocks: MtpBlocks, k: int, tensors: Mapping[str, Tensor], borrowed: BorrowedWeights) -> None:
        super().__init__()
        width = blocks.config.hidden_size
        eps = blocks.config.rms_norm_eps
        self.enorm, self.hnorm = blocks.norm(width, eps=eps), blocks.norm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.norm = blocks.norm(width, eps=eps) if "norm.weight" in tensors else nn.Identity()
        self.block = blocks.layers[k]
        embedding, head = tensors.get("embedding.weight"), tensors.get("head.weight")
        self.register_buffer("embedding", _own_or(borrowed.embedding, embedding), persistent=False)
        self.register_buffer("head", _own_or(borrowed.output, head), persistent=False)
        self._blocks, self._k = blocks, k

    def forward(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, plan: AttentionPlan) -> Tensor:
        """`token_ids` [T], `hidden` [T, H] of the layer before, `positions` [T] -> [T, H]."""
        embedded = embedding(token_ids, self.embedding).to(hidden.dtype)
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output: Tensor = self.norm(self._blocks.run(self._k, joined, positions, plan))
        return output

    def logits(self, output: Tensor) -> Tensor:
        """Logits [R, vocabulary] of `forward`'s output [R, H]."""
        return linear(output, self.head.to(output.dtype))


def _own_or(borrowed: Tensor, own: Tensor | None) -> Tensor:
    """A layer's own matrix, unless it is a copy of the target's, as most are published: that may be gigabytes."""
    if own is None or (own.shape == borrowed.shape and torch.equal(own.to(borrowed), borrowed)):
        return borrowed
    return own


class MtpStack(nn.Module):
    """The MTP layers of one checkpoint, in order, ready for inference."""

    def __init__(self, layers: list[MtpLayer], hidden_layer: int, max_positions: int | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.hidden_layer = hidden_layer
        self.max_positions = max_positions

    def __len__(self) -> int:
        return len(self.layers)

    def layer(self, k: int) -> MtpLayer:
        """Layer `k`, from 0."""
        layer = self.layers[k]
        if not isinstance(layer, MtpLayer):
            raise TypeError(f"layer {k} is no MTP layer")
        return layer

    @property
    def dtype(self) -> torch.dtype:
        return self.layer(0).eh_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.layer(0).eh_proj.weight.device

    @torch.inference_mode()
    def layout(self) -> KvLayout:
        """What the layers' attention stores for a slot. Raises ModelLoadError if it doesn't go through the plan."""
        recorder = ShapeRecorder()
        ids = torch.arange(_RECORDED, device=self.device)
        hidden = torch.zeros(_RECORDED, self.layer(0).eh_proj.out_features, dtype=self.dtype, device=self.device)
        for k in range(len(self)):
            hidden = self.layer(k)(ids, hidden, ids, recorder)
        if [index for index, _, _ in recorder.layers] != list(range(len(self))):
            raise ModelLoadError("The MTP layers have no attention that can be paged: use another speculation method.")
        return KvLayout(tuple(shape for _, shape, _ in recorder.layers), self.dtype)


def load_mtp(folder: Path, borrowed: BorrowedWeights, dtype: torch.dtype, target_layers: int) -> MtpStack:
    """The MTP layers of the checkpoint in `folder`, in `dtype`; matrices that it lacks are `borrowed`.

    `target_layers` tells the target's own layers apart from those after them. Raises ModelLoadError if there are none,
    or naming the tensor that is missing or doesn't fit.
    """
    document = read_draft_config(folder)
    config = read_architecture(folder, document)
    placed, layout = _placed(folder, target_layers, dtype)
    for k, tensors in enumerate(placed):
        _check_layer(folder, k, tensors, config.hidden_size)
    blocks = load_blocks(
        folder,
        config,
        {
            f"{k}.{name.removeprefix(BLOCK)}": tensor
            for k, tensors in enumerate(placed)
            for name, tensor in tensors.items()
            if name.startswith(BLOCK)
        },
        len(placed),
        layout.sliding,
    )
    layers = []
    for k, tensors in enumerate(placed):
        layer = MtpLayer(blocks, k, tensors, borrowed)
        own = {name: tensor for name, tensor in tensors.items() if name.partition(".")[0] in _SURROUNDING}
        layer.load_state_dict(own, strict=False)
        layers.append(layer)
    limit = getattr(config, "max_position_embeddings", None)
    return MtpStack(layers, target_layers, limit).to(dtype).eval().requires_grad_(False)


_SURROUNDING = ("enorm", "hnorm", "eh_proj", "norm")


def _placed(folder: Path, target_layers: int, dtype: torch.dtype) -> tuple[list[dict[str, Tensor]], MtpLayout]:
    """The tensors of each layer by their common names, and the layout that they were in."""
    layout = find_layout(draft_tensor_names(folder), target_layers)
    if layout is None:
        raise ModelLoadError(
            f"{folder} holds no MTP layers of a known layout: use a checkpoint that was published with them, "
            "or another speculation method."
        )
    found = read_draft_tensors(folder, wanted=lambda name: layout.place(name, target_layers) is not None)
    shared: dict[str, Tensor] = {}
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        place = layout.place(name, target_layers)
        if place is not None:
            where = shared if place[0] is None else layers.setdefault(place[0], {})
            where[place[1]] = tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype.itemsize > 1 else tensor
    if sorted(layers) != list(range(len(layers))):
        raise ModelLoadError(f"{folder} holds MTP layers {sorted(layers)}, but they must count from 0: fetch it again.")
    placed = [{**shared, **layers[k]} for k in range(len(layers))]
    for tensors in placed:
        projection = tensors.get("eh_proj.weight")
        if layout.hidden_first and projection is not None:
            half = projection.shape[1] // 2
            tensors["eh_proj.weight"] = torch.cat([projection[:, half:], projection[:, :half]], dim=1)
    return placed, layout


def _check_layer(folder: Path, k: int, tensors: Mapping[str, Tensor], width: int) -> None:
    expected: dict[str, tuple[int, ...]] = {
        "enorm.weight": (width,),
        "hnorm.weight": (width,),
        "eh_proj.weight": (width, 2 * width),
    }
    expected |= {"norm.weight": (width,)} if "norm.weight" in tensors else {}
    for name in ("embedding.weight", "head.weight"):
        expected |= {name: (len(tensors[name]), width)} if name in tensors else {}
    for name, shape in expected.items():
        if name not in tensors:
            raise ModelLoadError(f"MTP layer {k} in {folder} lacks tensor {name}: use a complete checkpoint.")
        if tuple(tensors[name].shape) != shape:
            raise ModelLoadError(
                f"Tensor {name} of MTP layer {k} in {folder} has shape {tuple(tensors[name].shape)}, but config.json "
                f"asks for {shape}: use a checkpoint whose config.json belongs to it."
            )
