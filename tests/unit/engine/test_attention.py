"""Paged attention equals plain attention over the whole sequence, however the sequence is cut, stored and batched."""

import random

import pytest
import torch
from torch import Tensor

from cluster.engine.attention import AttentionSpec, GatherSdpa
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors, LayerKv

KV_HEADS, DIM = 2, 8


def plain(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention of `[heads, n, dim]` over `[kv_heads, n, dim]`, term by term -> `[n, heads, dim]`."""
    heads, n, _ = query.shape
    repeat = heads // key.shape[0]
    out = torch.empty(n, heads, value.shape[-1])
    for head in range(heads):
        for i in range(n):
            first = 0 if spec.window is None else max(0, i - spec.window + 1)
            scores = key[head // repeat, first : i + 1] @ query[head, i] * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            weights = scores.exp()
            total = weights.sum() + (0 if spec.sinks is None else spec.sinks[head].exp())
            out[i, head] = weights / total @ value[head // repeat, first : i + 1]
    return out


def run_in_pieces(lengths: list[list[int]], heads: int, spec: AttentionSpec, block_size: int, scattered: bool) -> None:
    """Sequence s is computed in pieces of `lengths[s]`, the k-th pieces of all sequences in one batch."""
    generator = torch.Generator().manual_seed(7)
    totals = [sum(pieces) for pieces in lengths]
    inputs = [tuple(torch.randn(h, n, DIM, generator=generator) for h in (heads, KV_HEADS, KV_HEADS)) for n in totals]
    blocks_each = -(-max(totals) // block_size)
    ids = list(range(blocks_each * len(lengths)))
    if scattered:
        random.Random(3).shuffle(ids)
    tables = [ids[s * blocks_each : (s + 1) * blocks_each] for s in range(len(lengths))]
    kv = KvTensors(KvLayout((LayerKv(KV_HEADS, DIM, DIM),), torch.float32), len(ids), block_size, torch.device("cpu"))
    results: list[list[Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    for step in range(max(map(len, lengths))):
        active = [s for s in range(len(lengths)) if step < len(lengths[s])]
        rows = [PagedRow([0] * lengths[s][step], done[s], tables[s]) for s in active]
        batch = pack(rows, kv)
        cut = [tuple(t[:, done[s] : done[s] + lengths[s][step]] for t in inputs[s]) for s in active]
        query, key, value = (torch.cat([piece[i] for piece in cut], dim=1) for i in range(3))
        out = GatherSdpa().plan(batch, kv).run(0, query, key, value, spec)
        for s, row in zip(active, batch.rows, strict=True):
            results[s].append(out[row.offset : row.offset + row.length])
            done[s] += row.length
    for s, (query, key, value) in enumerate(inputs):
        torch.testing.assert_close(torch.cat(results[s]), plain(query, key, value, spec), atol=2e-6, rtol=1e-5)


SPECS = {
    "plain": AttentionSpec(0.35),
    "window": AttentionSpec(0.35, window=5),
    "window longer than the context": AttentionSpec(0.35, window=500),
    "softcap": AttentionSpec(0.35, softcap=2.0),
    "sinks": AttentionSpec(0.35, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 0.3, 1.0])),
    "window and sinks": AttentionSpec(0.35, window=7, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0, 0.3, 1.0])),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("scattered", [False, True], ids=["side by side", "scattered"])
def test_pieces_and_batches_of_any_shape_give_plain_attention(spec: AttentionSpec, scattered: bool) -> None:
    decodes = [[9, 1, 1, 4, 1], [30, 1, 1, 4, 1], [12, 1, 1, 4, 1], [3, 1, 1, 2, 1]]
    run_in_pieces(decodes, 6, spec, 4, scattered)
    run_in_pieces([[5, 20, 1], [40, 1, 3], [1, 1, 19]], 6, spec, 4, scattered)


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_any_block_size(block_size: int) -> None:
    run_in_pieces([[17, 5, 1], [16, 16, 1]], 6, SPECS["plain"], block_size, True)
    run_in_pieces([[17, 5, 1], [16, 16, 1]], 6, SPECS["window"], block_size, True)


def test_as_many_query_heads_as_kv_heads() -> None:
    run_in_pieces([[20, 1, 1], [7, 1, 1]], KV_HEADS, SPECS["plain"], 4, True)
    run_in_pieces([[20, 1, 1], [7, 1, 1]], KV_HEADS, SPECS["softcap"], 4, True)


def test_what_a_stranger_left_in_the_pool_is_never_seen() -> None:
    """Blocks are recycled uncleared, and the trash block holds anything: neither may leak into a padded group."""
    layout = KvLayout((LayerKv(KV_HEADS, DIM, DIM),), torch.float32)
    kv = KvTensors(layout, 12, 4, torch.device("cpu"))
    for tensor in (*kv.keys, *kv.values):
        tensor[6:].fill_(float("nan"))
    rows = [PagedRow([0], 2, [0]), PagedRow([0], 15, [1, 2, 3, 4])]
    batch = pack(rows, kv)
    query, key, value = torch.randn(2, 2, DIM), torch.randn(KV_HEADS, 2, DIM), torch.randn(KV_HEADS, 2, DIM)
    assert GatherSdpa().plan(batch, kv).run(0, query, key, value, SPECS["plain"]).isfinite().all()


def test_recomputed_positions_read_the_shared_block_and_leave_it_alone() -> None:
    layout = KvLayout((LayerKv(KV_HEADS, DIM, DIM),), torch.float32)
    kv = KvTensors(layout, 3, 4, torch.device("cpu"))
    shared_keys, shared_values = torch.randn(6, KV_HEADS, DIM), torch.randn(6, KV_HEADS, DIM)
    kv.write(0, torch.arange(6), shared_keys, shared_values)
    batch = pack([PagedRow([0, 0, 0], 4, [0, 1], held=6)], kv)
    query, key, value = (torch.randn(h, 3, DIM) for h in (6, KV_HEADS, KV_HEADS))
    out = GatherSdpa().plan(batch, kv).run(0, query, key, value, SPECS["plain"])
    keys, values = kv.read(0, [0, 1], 7)
    assert torch.equal(keys[:6], shared_keys)
    assert torch.equal(values[:6], shared_values)
    padded = torch.cat([torch.zeros(6, 4, DIM), query], dim=1)
    expected = plain(padded, keys.transpose(0, 1), values.transpose(0, 1), SPECS["plain"])[4:]
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
