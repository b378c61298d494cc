"""Attention over paged KV, behind one interface: `plan(batch, kv)` once per step, `run(layer, ...)` per layer.

`paged_attention` is the function that transformers' models call in place of their own (registered under
`TANDEM_PAGED`); it hands the layer's new keys and values to the plan that travels in the forward's keyword arguments.
Heads that are no transformers model (an EAGLE3 draft) call `plan.run` directly.

Owns `GatherSdpa`, the reference backend: write the new KV to its slots, gather each row's blocks,
scaled_dot_product_attention. Short rows (decodes, with their drafts) of similar context run as one padded group; long
rows (prefill chunks) run one by one. All index tensors and masks are made once a step and shared by the layers.
A row's tokens may also be alternatives that don't see each other (a tree of drafts, with RoPE positions by depth): its
layout then replaces the causal mask over its last slots.
Invariant: a row reads only blocks of its own block table; where a group is padded, the row's own first block is read
and masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from cluster.engine.batch import PackedBatch, RowExtent
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.visibility import hidden_slots

TANDEM_PAGED = "tandem_paged"

# Rows of at most this many queries are grouped; longer ones keep SDPA busy on their own.
_GROUPED_QUERIES = 16
# A group may hold contexts up to twice its shortest plus this many positions, which bounds the padding.
_CONTEXT_SLACK = 64


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a layer asks of attention beyond plain causal softmax.

    `window` counts the positions that a query sees, itself included; `softcap` bounds the scores; `sinks` `[heads]` are
    logits of a position that takes weight but has no value.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class AttentionPlan(Protocol):
    """One step's attention."""

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Store the new KV and attend.

        `query` is `[heads, T, key_dim]`, `key` and `value` are `[kv_heads, T, dim]`; returns `[T, heads, value_dim]`.
        """
        ...


class PagedAttention(Protocol):
    """A backend: how attention over paged KV is computed on a kind of device."""

    def plan(self, batch: PackedBatch, kv: KvTensors) -> AttentionPlan: ...


class GatherSdpa:
    """Gather and SDPA; runs anywhere, the reference for other backends. Its plans must run one after another."""

    def __init__(self) -> None:
        self._workspace = _Workspace()

    def plan(self, batch: PackedBatch, kv: KvTensors) -> AttentionPlan:
        return _GatherPlan(batch, kv, self._workspace)


class _Workspace:
    """Buffers for gathered KV. Fresh memory for each layer would cost more in page faults than the copy."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def gather(self, name: str, pool: Tensor, blocks: Tensor) -> Tensor:
        """`pool[blocks]`, valid until the next call for the same name."""
        shape = (blocks.shape[0], *pool.shape[1:])
        size = blocks.shape[0] * pool[0].numel()
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != pool.dtype or buffer.device != pool.device:
            buffer = self._buffers[name] = pool.new_empty(size)
        return torch.index_select(pool, 0, blocks, out=buffer[:size].view(shape))


class _GatherPlan:
    def __init__(self, batch: PackedBatch, kv: KvTensors, workspace: _Workspace) -> None:
        self._kv = kv
        self._slots = batch.slots
        self._groups = [_Group(rows, kv, workspace) for rows in _grouped(batch.rows)]

    def run(self, layer: int, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        self._kv.write(layer, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        if len(self._groups) == 1 and self._groups[0].whole:
            return self._groups[0].attend(query, layer, spec)
        heads, tokens, _ = query.shape
        out = query.new_empty(tokens, heads, value.shape[-1])
        for group in self._groups:
            out[group.queries] = group.attend(query[:, group.queries], layer, spec)
        return out


def _grouped(rows: Sequence[RowExtent]) -> list[list[RowExtent]]:
    """Rows that run as one SDPA call: equal query lengths, contexts alike; long rows alone."""
    groups: list[list[RowExtent]] = []
    for row in sorted(rows, key=lambda row: (row.length, row.context)):
        first = groups[-1][0] if groups else None
        fits = (
            first is not None
            and row.length == first.length <= _GROUPED_QUERIES
            and row.context <= 2 * first.context + _CONTEXT_SLACK
        )
        if fits:
            groups[-1].append(row)
        else:
            groups.append([row])
    return [sorted(group, key=lambda row: row.offset) for group in groups]


class _Group:
    """Rows of one query length. `queries` selects their tokens from the packed batch."""

    def __init__(self, rows: list[RowExtent], kv: KvTensors, workspace: _Workspace) -> None:
        self._rows = rows
        self._kv = kv
        self._device = kv.device
        self._workspace = workspace
        self._length = rows[0].length
        self._ordinary = all(row.layout is None and not row.hole for row in rows)
        first, last = rows[0].offset, rows[-1].offset + self._length
        self.whole = first == 0 and last - first == len(rows) * self._length
        self.queries = self._select(first, last)
        self._reads: dict[int | None, _Read] = {}
        self._masks: dict[tuple[int | None, int], Tensor] = {}

    def _select(self, first: int, last: int) -> slice | Tensor:
        if last - first == len(self._rows) * self._length:
            return slice(first, last)
        tokens = [row.offset + i for row in self._rows for i in range(self._length)]
        return torch.tensor(tokens, device=self._device)

    def attend(self, query: Tensor, layer: int, spec: AttentionSpec) -> Tensor:
        """`query` `[heads, rows * length, dim]` -> `[rows * length, heads, value_dim]`."""
        read = self._read(spec.window)
        keys, values = read.gather(self._kv, layer, self._workspace)
        heads, kv_heads, batch = query.shape[0], keys.shape[1], len(self._rows)
        queries = query.reshape(heads, batch, self._length, -1).transpose(0, 1)
        folded = self._length <= _GROUPED_QUERIES
        if folded:  # the query heads of one KV head become rows of one product
            queries = queries.reshape(batch, kv_heads, -1, query.shape[-1])
        repeat = heads // kv_heads if folded else 1
        out = _scores_and_values(queries, keys, values, self._mask(read, spec.window, repeat, query.dtype), spec)
        return out.reshape(batch, heads, self._length, -1).transpose(1, 2).flatten(0, 1)

    def _read(self, window: int | None) -> _Read:
        if window not in self._reads:
            self._reads[window] = _Read.of(self._rows, window, self._kv.block_size, self._device)
        return self._reads[window]

    def _mask(self, read: _Read, window: int | None, repeat: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask `[rows, 1, repeat * length, read.length]`, or None if every query sees all that is read."""
        if self._length == 1 and read.exact and self._ordinary:
            return None
        if (window, repeat) not in self._masks:
            hidden = hidden_slots(self._rows, read.starts, read.length, window, self._device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=self._device).masked_fill_(hidden, float("-inf"))
            self._masks[window, repeat] = mask.repeat(1, repeat, 1)[:, None]
        return self._masks[window, repeat]


@dataclass(frozen=True, slots=True)
class _Read:
    """What a group reads: per row a run of `length` positions from `starts[row]` on.

    `blocks` is None where the one row's blocks lie side by side in the pool: then `run` is a slice of its slots and
    nothing is copied. Otherwise `run` selects from the positions of the gathered blocks. `exact`: with one query per
    row, it sees exactly the positions read.
    """

    blocks: Tensor | None
    run: slice
    rows: int
    starts: tuple[int, ...]
    length: int
    exact: bool

    @classmethod
    def of(cls, rows: Sequence[RowExtent], window: int | None, size: int, device: torch.device) -> _Read:
        firsts = [row.first_seen(window) for row in rows]
        if len(rows) == 1:
            return cls._single(rows[0], firsts[0], size, device)
        tables = [row.blocks[first // size :] for row, first in zip(rows, firsts, strict=True)]
        width = max(map(len, tables))
        padded = [block for table in tables for block in (*table, *table[:1] * (width - len(table)))]
        starts = tuple(first // size * size for first in firsts)
        needed = {row.context - start for row, start in zip(rows, starts, strict=True)}
        exact = len(needed) == 1 and list(starts) == firsts
        return cls(torch.tensor(padded, device=device), slice(0, max(needed)), len(rows), starts, max(needed), exact)

    @classmethod
    def _single(cls, row: RowExtent, first: int, size: int, device: torch.device) -> _Read:
        table, skipped = row.blocks[first // size :], first % size
        length = row.context - first
        if all(b == table[0] + i for i, b in enumerate(table)):
            at = table[0] * size + skipped
            return cls(None, slice(at, at + length), 1, (first,), length, True)
        return cls(torch.tensor(table, device=device), slice(skipped, skipped + length), 1, (first,), length, True)

    def gather(self, kv: KvTensors, layer: int, workspace: _Workspace) -> tuple[Tensor, Tensor]:
        """Keys and values `[rows, kv_heads, length, dim]`."""
        if self.blocks is None:
            keys, values = kv.slot_views(layer)
            return keys[self.run].transpose(0, 1)[None], values[self.run].transpose(0, 1)[None]
        keys = workspace.gather("keys", kv.keys[layer], self.blocks)
        values = workspace.gather("values", kv.values[layer], self.blocks)
        return self._rows_of(keys), self._rows_of(values)

    def _rows_of(self, gathered: Tensor) -> Tensor:
        return gathered.view(self.rows, -1, *gathered.shape[2:])[:, self.run].transpose(1, 2)


def _scores_and_values(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec
) -> Tensor:
    """Attention of `queries` `[rows, heads or kv_heads, q, dim]`; heads are expanded where they outnumber the keys'."""
    if spec.softcap is None and spec.sinks is None:
        grouped = queries.shape[1] != keys.shape[1]
        return F.scaled_dot_product_attention(queries, keys, values, mask, scale=spec.scale, enable_gqa=grouped)
    return _attend_by_hand(queries, keys, values, mask, spec)


def _attend_by_hand(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, spec: AttentionSpec) -> Tensor:
    """The same with what SDPA lacks: soft-capped scores (Gemma 2) and attention sinks (gpt-oss)."""
    rows, kv_heads = keys.shape[:2]
    shape = queries.shape
    queries = queries.reshape(rows, kv_heads, -1, shape[-1])
    repeat = queries.shape[2] // shape[2]
    scores = torch.matmul(queries, keys.transpose(2, 3)) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if mask is not None:
        scores = scores + (mask if repeat == 1 else mask.repeat(1, 1, repeat, 1))
    if spec.sinks is not None:
        each = queries.shape[2] // (spec.sinks.shape[0] // kv_heads)
        sinks = spec.sinks.reshape(1, kv_heads, -1, 1).repeat_interleave(each, dim=2).expand(rows, -1, -1, 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : keys.shape[2]], values).reshape(*shape[:-1], -1)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: AttentionPlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls: `[1, heads, T, dim]` in, `[1, T, heads, dim]` out. The mask is ours."""
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    return paged.run(module.layer_idx, query[0], key[0], value[0], spec)[None], None


AttentionInterface.register(TANDEM_PAGED, paged_attention)
