"""Rows whose pool lacks a stretch of their context attend to the rest, at its own positions."""

import pytest
import torch
from torch import Tensor

from cluster.engine.attention import AttentionSpec, GatherSdpa
from cluster.engine.batch import PagedRow, ancestor_mask, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors, LayerKv

HEADS, DIM, SIZE, BLOCKS = 2, 8, 4, 20
HOLE = range(8, 20)


def pool(generator: torch.Generator) -> KvTensors:
    """Random everywhere, but for the trash block, which must not be read."""
    kv = KvTensors(KvLayout((LayerKv(HEADS, DIM, DIM),), torch.float32), BLOCKS, SIZE, torch.device("cpu"))
    for tensor in (*kv.keys, *kv.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
        tensor[BLOCKS].fill_(float("nan"))
    return kv


def table(first: int, blocks: int) -> list[int]:
    """Blocks from `first` on, and the trash block in the hole."""
    return [BLOCKS if i * SIZE in HOLE else first + i for i in range(blocks)]


def expected(kv: KvTensors, blocks: list[int], query: Tensor, seen: list[int], scale: float) -> Tensor:
    """Attention of one `query` [heads, dim] over the positions `seen`."""
    keys, values = kv.slot_views(0)
    slots = torch.tensor(kv.slots(blocks, seen))
    weights = torch.softmax(torch.einsum("hd,shd->hs", query, keys[slots]) * scale, dim=1)
    return torch.einsum("hs,shd->hd", weights, values[slots])


@pytest.mark.parametrize("window", [None, 3, 6, 15, 100])
def test_tokens_after_a_hole_see_what_there_is(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    kv = pool(generator)
    rows = [  # a chunk and decodes, of which one has no hole
        PagedRow([0] * 5, 20, table(0, 7)),
        PagedRow([0], 25, table(7, 7)),
        PagedRow([0], 21, [14, 15, 16, 17, 18, 19]),
    ]
    batch = pack(rows, kv)
    assert batch.positions[0].tolist() == [20, 21, 22, 23, 24, 25, 21]
    query, key, value = (torch.randn(HEADS, 7, DIM, generator=generator) for _ in range(3))
    out = GatherSdpa().plan(batch, kv).run(0, query, key, value, AttentionSpec(0.35, window=window))
    at = 0
    for row in rows:
        hole = HOLE if BLOCKS in row.block_table else range(0)
        for position in range(row.start, row.start + len(row.tokens)):
            first = 0 if window is None else max(0, position - window + 1)
            seen = [i for i in range(first, position + 1) if i not in hole]
            right = expected(kv, list(row.block_table), query[:, at], seen, 0.35)
            torch.testing.assert_close(out[at], right, atol=2e-6, rtol=1e-5)
            at += 1


@pytest.mark.parametrize("window", [None, 3, 10])
def test_trees_after_a_hole(window: int | None) -> None:
    generator = torch.Generator().manual_seed(2)
    kv = pool(generator)
    parents, depths = [None, None, 0], [0, 0, 1]
    row = PagedRow([0] * 3, 22, table(0, 7), 0, [22 + depth for depth in depths], ancestor_mask(parents))
    batch = pack([row], kv)
    query, key, value = (torch.randn(HEADS, 3, DIM, generator=generator) for _ in range(3))
    out = GatherSdpa().plan(batch, kv).run(0, query, key, value, AttentionSpec(0.35, window=window))
    for node, ancestors in enumerate([[0], [1], [0, 2]]):
        first = 0 if window is None else max(0, 22 + depths[node] - window + 1)
        before = [i for i in range(first, 22) if i not in HOLE]
        own = [22 + each for each in ancestors if 22 + depths[each] >= first]
        right = expected(kv, list(row.block_table), query[:, node], before + own, 0.35)
        torch.testing.assert_close(out[node], right, atol=2e-6, rtol=1e-5)
