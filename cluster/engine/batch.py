"""Packing of rows of different lengths into one 1xT forward.

A row is a run of tokens of one sequence in consecutive slots: the tokens that come next, or alternatives of what may
come next, which share RoPE positions and don't see each other. `pack` decides the slot every token's KV is written to:
slots below the row's `held` already have their KV in a block that other requests may share, so KV that is computed anew
goes to the trash slot. Reading is not affected by `held`. Called by the engine (target rows) and by the drafters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.engine.kv_tensors import KvTensors


@dataclass(frozen=True, slots=True)
class PagedRow:
    """`tokens` of one sequence in slots `start ..`; `block_table` covers slots `0 .. start + len(tokens)`.

    Where the table names the trash block, in one stretch before `start`, the sequence has a hole: blocks that nobody
    computed, which no token sees.

    visible: bool [tokens, w], which of the row's last w slots, its own being the very last, each token sees; they all
    see what lies before these w. None: each token sees itself and all before it.
    positions: RoPE positions of those w slots (of the tokens alone without `visible`), in which sliding windows are
    measured too. None: a slot's number is its position.
    """

    tokens: Sequence[int]
    start: int
    block_table: Sequence[int]
    held: int = 0
    positions: Sequence[int] | None = None
    visible: Tensor | None = None


def ancestor_mask(parents: Sequence[int | None]) -> Tensor:
    """bool [nodes, nodes]: each node sees itself and its ancestors. Parents come before their children."""
    sees = np.eye(len(parents), dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent is not None:
            sees[node] |= sees[parent]
    return torch.from_numpy(sees)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which of a row's last w slots its tokens see (`visible`, bool [tokens, w]), and the RoPE positions of these."""

    visible: Tensor
    positions: tuple[int, ...]

    @classmethod
    def of(cls, row: PagedRow) -> Layout | None:
        """None for the ordinary row. Raises ValueError if its mask and positions don't fit its tokens."""
        if row.visible is None and row.positions is None:
            return None
        count, end = len(row.tokens), row.start + len(row.tokens)
        visible = torch.ones(count, count, dtype=torch.bool).tril() if row.visible is None else row.visible
        width = visible.shape[1]
        positions = tuple(range(end - width, end) if row.positions is None else row.positions)
        if visible.shape[0] != count or not count <= width <= end or len(positions) != width:
            raise ValueError(f"{count} tokens up to slot {end} have {len(positions)} positions, mask {visible.shape}")
        return cls(visible, positions)


@dataclass(frozen=True, slots=True)
class RowExtent:
    """Where a row lies in the packed batch (`offset`, `length`) and what it attends to (`start + length` slots).

    `layout` is None for the ordinary row, whose tokens see all before them. `hole` are the slots of the sequence that
    were left out: `blocks` and `start` count without them.
    """

    offset: int
    length: int
    start: int
    blocks: tuple[int, ...]
    layout: Layout | None = None
    hole: range = range(0)

    @property
    def context(self) -> int:
        return self.start + self.length

    def first_seen(self, window: int | None) -> int:
        """The first slot to read, where a token sees so many positions; or one before it, if there is a hole."""
        if window is None:
            return 0
        if self.layout is None:
            return max(0, self.start - window + 1)
        positions = self.layout.positions
        earliest = min(positions[-self.length :]) - len(self.hole)
        return max(0, min(earliest - window + 1, self.context - len(positions)))


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


def _hole(table: tuple[int, ...], kv: KvTensors) -> range:
    """The slots for which a block table names the trash block."""
    count = table.count(kv.num_blocks)
    first = table.index(kv.num_blocks) if count else 0
    return range(first * kv.block_size, (first + count) * kv.block_size)


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
        layout = Layout.of(row)
        hole = _hole(table, kv)
        blocks = table if not hole else table[: hole.start // size] + table[hole.stop // size :]
        extents.append(RowExtent(len(ids), len(row.tokens), row.start - len(hole), blocks, layout, hole))
        ids.extend(row.tokens)
        positions.extend(range(row.start, end) if layout is None else layout.positions[-len(row.tokens) :])
        written_from = min(max(row.start, row.held), end)
        slots.extend([kv.trash_slot] * (written_from - row.start))
        slots.extend(kv.slots(table, range(written_from, end)))
    stacked = torch.tensor((ids, positions, slots), dtype=torch.long).to(kv.device)
    return PackedBatch(stacked[0:1], stacked[1:2], stacked[2], tuple(extents))
