"""The tensors of a pool: what is stored where, and what a copy moves."""

import torch

from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors, LayerKv

LAYOUT = KvLayout((LayerKv(2, 4, 4), LayerKv(1, 6, 3)), torch.float32)


def make(num_blocks: int = 4, block_size: int = 4) -> KvTensors:
    return KvTensors(LAYOUT, num_blocks, block_size, torch.device("cpu"))


def fill(kv: KvTensors, slots: range) -> None:
    for layer, shape in enumerate(LAYOUT.layers):
        keys = torch.randn(len(slots), shape.kv_heads, shape.key_dim)
        kv.write(layer, torch.tensor(slots), keys, torch.randn(len(slots), shape.kv_heads, shape.value_dim))


def test_bytes_per_token_counts_every_layer_once() -> None:
    assert LAYOUT.bytes_per_token == 4 * (2 * 8 + 1 * 9)
    assert KvLayout(LAYOUT.layers, torch.bfloat16).bytes_per_token == 2 * (2 * 8 + 1 * 9)


def test_a_new_pool_is_zero() -> None:
    kv = make()
    assert all(not tensor.any() for tensor in (*kv.keys, *kv.values))


def test_copy_moves_the_named_units_of_every_layer_and_leaves_the_source() -> None:
    kv = make()
    fill(kv, range(16))
    before = [kv.read(layer, [0, 1, 2, 3], 16) for layer in range(2)]
    kv.copy_block(1, 3, 3)
    for layer, (keys, values) in enumerate(before):
        new_keys, new_values = kv.read(layer, [0, 1, 2, 3], 16)
        for new, old in ((new_keys, keys), (new_values, values)):
            assert torch.equal(new[:12], old[:12])
            assert torch.equal(new[12:15], old[4:7])
            assert torch.equal(new[15], old[15])


def test_scrub_clears_the_blocks_and_the_trash_block_only() -> None:
    kv = make()
    fill(kv, range(20))
    kv.scrub([2])
    for tensor in (*kv.keys, *kv.values):
        assert not tensor[2].any()
        assert not tensor[kv.num_blocks].any()
        assert tensor[0].all()
        assert tensor[3].all()


def test_moved_slots_may_overlap() -> None:
    kv = make(num_blocks=3)
    noise = torch.Generator().manual_seed(0)
    for tensor in (*kv.keys, *kv.values):
        tensor.normal_(generator=noise)
    before = [tensor.flatten(0, 1).clone() for tensor in (*kv.keys, *kv.values)]
    kv.move(kv.slots([2, 0], [2, 3, 5]), kv.slots([2, 0], [1, 2, 3]))
    kv.move([], [])
    for tensor, old in zip((*kv.keys, *kv.values), before, strict=True):
        old[[9, 10, 11]] = old[[10, 11, 1]]
        assert torch.equal(tensor.flatten(0, 1), old)


def test_pack_lays_rows_end_to_end_and_sends_held_positions_to_the_trash() -> None:
    kv = make(num_blocks=8)
    rows = [PagedRow([11, 12, 13], 3, [5, 2], held=5), PagedRow([14], 0, [7])]
    batch = pack(rows, kv)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14]]
    assert batch.positions.tolist() == [[3, 4, 5, 0]]
    assert batch.slots.tolist() == [kv.trash_slot, kv.trash_slot, 2 * 4 + 1, 7 * 4]
    assert [(row.offset, row.length, row.context, row.blocks) for row in batch.rows] == [
        (0, 3, 6, (5, 2)),
        (3, 1, 1, (7,)),
    ]


def test_pack_ignores_blocks_beyond_the_row_and_held_beyond_it() -> None:
    kv = make(num_blocks=8)
    batch = pack([PagedRow([1, 2], 0, [5, 2, 3], held=99)], kv)
    assert batch.rows[0].blocks == (5,)
    assert batch.slots.tolist() == [kv.trash_slot, kv.trash_slot]
