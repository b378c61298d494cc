"""The tensors behind one KV pool.

Per layer a key and a value tensor `[blocks + 1, block_size, kv_heads, head_dim]`, zero-initialised. Block ids come
from `cluster.core`; the extra last block is the trash block, where positions are written that must be computed but
whose KV is already held by a shared block. Nothing ever reads the trash block. Used by the attention backends and by
the engine, which carries out the copies that a claim orders.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerKv:
    """Shape of one layer's cache: heads, and the widths of a key and of a value (they differ in expanded MLA).

    `window`: how many positions a token sees, itself included; None if it sees all before it, or that isn't known."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    @property
    def elements(self) -> int:
        """Elements of one token's key and value together."""
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a pool stores for a token: one `LayerKv` per attention layer, in layer order."""

    layers: tuple[LayerKv, ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.elements for layer in self.layers) * self.dtype.itemsize

    @property
    def window(self) -> int | None:
        """How many positions any layer sees; None if one of them sees all."""
        windows = [layer.window for layer in self.layers if layer.window is not None]
        return max(windows) if windows and len(windows) == len(self.layers) else None


class KvTensors:
    """Storage of `num_blocks` blocks with ids `0 .. num_blocks - 1`; `num_blocks` itself is the trash block."""

    def __init__(self, layout: KvLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device
        self.keys = [self._allocate(layer.kv_heads, layer.key_dim) for layer in layout.layers]
        self.values = [self._allocate(layer.kv_heads, layer.value_dim) for layer in layout.layers]
        self._key_slots = [keys.flatten(0, 1) for keys in self.keys]
        self._value_slots = [values.flatten(0, 1) for values in self.values]

    def _allocate(self, heads: int, width: int) -> Tensor:
        shape = (self.num_blocks + 1, self.block_size, heads, width)
        return torch.zeros(shape, dtype=self.layout.dtype, device=self.device)

    @property
    def trash_slot(self) -> int:
        """The slot (position counted over all blocks) that throw-away writes go to."""
        return self.num_blocks * self.block_size

    def slots(self, block_table: Sequence[int], places: Iterable[int]) -> list[int]:
        """The slots of a sequence's `places`, counted from its start, in this pool."""
        size = self.block_size
        return [block_table[place // size] * size + place % size for place in places]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store `keys`, `values` `[T, kv_heads, head_dim]` at `slots` `[T]`."""
        self._key_slots[layer].index_copy_(0, slots, keys)
        self._value_slots[layer].index_copy_(0, slots, values)

    def slot_views(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer seen as `[slots, kv_heads, head_dim]`."""
        return self._key_slots[layer], self._value_slots[layer]

    def copy_block(self, src: int, dst: int, units: int) -> None:
        """Copy the first `units` positions of block `src` to block `dst`, in every layer (copy-on-write)."""
        for tensor in (*self.keys, *self.values):
            tensor[dst, :units].copy_(tensor[src, :units])

    def move(self, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy the KV of slots `src` to slots `dst`, in every layer, as if all at once: they may overlap."""
        if src:
            come, go = torch.tensor((src, dst), device=self.device)
            for slots in (*self._key_slots, *self._value_slots):
                slots.index_copy_(0, go, slots.index_select(0, come))

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero `blocks` and the trash block, so that a NaN computed by one request can never reach another one."""
        index = torch.tensor([*blocks, self.num_blocks], device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor.index_fill_(0, index, 0)

    def read(self, layer: int, block_table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values `[length, kv_heads, head_dim]` of a sequence (audit and tests)."""
        blocks = torch.tensor(block_table, dtype=torch.long, device=self.device)
        keys, values = (
            t.index_select(0, blocks).flatten(0, 1)[:length] for t in (self.keys[layer], self.values[layer])
        )
        return keys, values
