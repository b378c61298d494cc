"""Packing of rows of different lengths into one 1xT forward.

A row is a run of consecutive tokens of one sequence. `pack` decides the slot every token's KV is written to:
positions below the row's `held` already have their KV in a block that other requests may share, so they go to the
trash slot. Reading is not affected by `held`. Called by the engine (target rows) and by the drafters (draft rows).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.engine.kv_tensors import KvTensors


@dataclass(frozen=True, slots=True)
class PagedRow:
    """`tokens` of one sequence at positions `start ..`; `block_table` covers positions `0 .. start + len(tokens)`."""

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    held: int = 0


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Where a row lies in the packed batch (`offset`, `length`) and what it attends to (`start + length` positions)."""

    offset: int
    length: int
    start: int
    blocks: tuple[int, ...]

    @property
    def context(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """`input_ids` and `positions` are `[1, T]`, `slots` is `[T]`; all int64 on the pool's device."""

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: tuple[RowExtent, ...]

    @property
    def num_tokens(self) -> int:
        return self.slots.shape[0]


def pack(rows: Sequence[PagedRow], kv: KvTensors) -> PackedBatch:
    """Lay `rows` end to end. Index tensors are built here, once per step, not per layer."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    extents: list[RowExtent] = []
    size = kv.block_size
    for row in rows:
        end = row.start + len(row.tokens)
        table = tuple(row.block_table[: -(-end // size)])
        extents.append(RowExtent(len(ids), len(row.tokens), row.start, table))
        ids.extend(row.tokens)
        positions.extend(range(row.start, end))
        written_from = min(max(row.start, row.held), end)
        slots.extend([kv.trash_slot] * (written_from - row.start))
        slots.extend(table[p // size] * size + p % size for p in range(written_from, end))
    stacked = torch.tensor((ids, positions, slots), dtype=torch.long).to(kv.device)
    return PackedBatch(stacked[0:1], stacked[1:2], stacked[2], tuple(extents))
