"""Rows whose tokens are alternatives, or see each other both ways: attention equals a dense one under the same mask."""

import random

import pytest
import torch
from torch import Tensor

from cluster.engine.attention import AttentionSpec, GatherSdpa
from cluster.engine.batch import PagedRow, pack
from cluster.engine.kv_tensors import KvLayout, KvTensors, LayerKv
from tests.unit.engine.test_attention import DIM, KV_HEADS, SPECS

HEADS = 6
BLOCK = 4


def tree_mask(parents: list[int | None]) -> Tensor:
    """Each node sees itself and its ancestors."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent is not None:
            mask[node] |= mask[parent]
    return mask


def random_tree(rng: random.Random, nodes: int) -> tuple[Tensor, list[int]]:
    """The mask and the depths (from 0) of a random tree."""
    parents = [None if not node else rng.choice([None, *range(node)]) for node in range(nodes)]
    mask = tree_mask(parents)
    return mask, (mask.sum(1) - 1).tolist()


def dense(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of `[heads, q, dim]` over `[kv_heads, n, dim]` under the mask `sees` [q, n] -> `[q, heads, dim]`."""
    each = query.shape[0] // key.shape[0]
    scores = query @ key.repeat_interleave(each, 0).transpose(1, 2) * spec.scale
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    weights = scores.exp() * sees
    total = weights.sum(-1, keepdim=True)
    if spec.sinks is not None:
        total = total + spec.sinks[:, None, None].exp()
    return ((weights / total) @ value.repeat_interleave(each, 0)).transpose(0, 1)


class Case:
    """One row over a context of random KV, and what its tokens ought to see."""

    def __init__(self, start: int, tokens: int, visible: Tensor | None, positions: list[int] | None) -> None:
        self.start, self.tokens, self.visible, self.positions = start, tokens, visible, positions
        self.context = start + tokens

    def sees(self, window: int | None) -> Tensor:
        """[tokens, context], from the definition."""
        visible = torch.ones(self.tokens, self.tokens).tril().bool() if self.visible is None else self.visible
        width = visible.shape[1]
        at = list(range(self.context))
        if self.positions is not None:
            at[-width:] = self.positions
        sees = torch.ones(self.tokens, self.context, dtype=torch.bool)
        sees[:, -width:] = visible
        for token in range(self.tokens):
            for slot in range(self.context):
                if window is not None and at[slot] <= at[self.start + token] - window:
                    sees[token, slot] = False
        return sees


def check(cases: list[Case], spec: AttentionSpec, heads: int = HEADS) -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = [-(-case.context // BLOCK) for case in cases]
    ids = list(range(sum(blocks)))
    random.Random(1).shuffle(ids)
    layout = KvLayout((LayerKv(KV_HEADS, DIM, DIM),), torch.float32)
    kv = KvTensors(layout, len(ids), BLOCK, torch.device("cpu"))
    tables = [[ids.pop() for _ in range(count)] for count in blocks]
    inputs = []
    for case, table in zip(cases, tables, strict=True):
        keys, values = torch.randn(2, KV_HEADS, case.context, DIM, generator=generator)
        inputs.append((torch.randn(heads, case.tokens, DIM, generator=generator), keys, values))
        slots = torch.tensor([table[i // BLOCK] * BLOCK + i % BLOCK for i in range(case.start)], dtype=torch.long)
        kv.write(0, slots, keys[:, : case.start].transpose(0, 1), values[:, : case.start].transpose(0, 1))
    batch = pack(
        [
            PagedRow([0] * case.tokens, case.start, table, 0, case.positions, case.visible)
            for case, table in zip(cases, tables, strict=True)
        ],
        kv,
    )
    query = torch.cat([query for query, _, _ in inputs], dim=1)
    new = [torch.cat([each[i][:, case.start :] for each, case in zip(inputs, cases, strict=True)], 1) for i in (1, 2)]
    out = GatherSdpa().plan(batch, kv).run(0, query, *new, spec)
    for case, row, (queries, keys, values) in zip(cases, batch.rows, inputs, strict=True):
        got = out[row.offset : row.offset + row.length]
        expected = dense(queries, keys, values, case.sees(spec.window), spec)
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def tree(rng: random.Random, start: int, nodes: int, known: int = 1) -> Case:
    """`known` tokens, then a tree of drafts, as the target verifies them; positions by depth."""
    mask, depths = random_tree(rng, nodes)
    visible = torch.ones(known + nodes, known + nodes).tril().bool()
    visible[known:, known:] = mask
    positions = [*range(start, start + known), *(start + known + depth for depth in depths)]
    return Case(start, known + nodes, visible, positions)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_trees_of_drafts(spec: AttentionSpec) -> None:
    """Alone and among ordinary rows, short enough to be grouped and too long for that."""
    rng = random.Random(5)
    for nodes in (1, 7, 40):
        check([tree(rng, 30, nodes, 3)], spec)
        check([tree(rng, start, nodes) for start in (1, 13, 18, 90)], spec)
        check([tree(rng, 13, nodes), Case(9, nodes + 1, None, None), Case(40, 1, None, None)], spec)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("count", [1, 5])
def test_a_level_of_a_tree_sees_its_ancestors_in_earlier_slots(spec: AttentionSpec, count: int) -> None:
    """A drafter adds a level at a time: the mask reaches back over slots before the row's own."""
    rng = random.Random(6)
    cases = []
    for start in (2, 11, 47):
        mask, depths = random_tree(rng, 9 + count)
        cases.append(Case(start + 9, count, mask[9:], [start + depth for depth in depths]))
    check(cases, spec)
    check(cases[:1], spec)


def test_tokens_that_see_each_other_both_ways() -> None:
    for tokens in (3, 20):
        cases = [Case(start, tokens, torch.ones(tokens, tokens, dtype=torch.bool), None) for start in (0, 6, 33)]
        check(cases, SPECS["plain"])
        check(cases[1:2], SPECS["softcap"])


def test_positions_alone_move_only_the_window() -> None:
    for spec in (SPECS["plain"], SPECS["window"], SPECS["window and sinks"]):
        check([Case(20, 3, None, [20, 23, 24]), Case(20, 3, None, None)], spec)


def test_as_many_query_heads_as_kv_heads() -> None:
    check([tree(random.Random(2), 10, 6), tree(random.Random(3), 12, 6)], SPECS["softcap"], heads=KV_HEADS)
    check([tree(random.Random(2), 10, 20)], SPECS["window"], heads=KV_HEADS)


def test_rope_positions_of_a_row_are_those_given() -> None:
    kv = KvTensors(KvLayout((LayerKv(1, 2, 2),), torch.float32), 4, BLOCK, torch.device("cpu"))
    batch = pack([PagedRow([5, 6, 7], 2, [3, 1], 3, [2, 3, 3]), PagedRow([8], 4, [0, 2])], kv)
    assert batch.positions.tolist() == [[2, 3, 3, 4]]
    assert batch.slots.tolist() == [kv.trash_slot, 3 * BLOCK + 3, BLOCK, 2 * BLOCK]


@pytest.mark.parametrize(
    ("visible", "positions"),
    [
        (torch.ones(2, 3), None),
        (torch.ones(3, 2), None),
        (torch.ones(3, 9), None),
        (None, [4]),
        (torch.ones(3, 4), [1]),
    ],
)
def test_masks_and_positions_that_do_not_fit_are_refused(visible: Tensor | None, positions: list[int] | None) -> None:
    kv = KvTensors(KvLayout((LayerKv(1, 2, 2),), torch.float32), 4, BLOCK, torch.device("cpu"))
    with pytest.raises(ValueError, match="3 tokens"):
        pack([PagedRow([5, 6, 7], 2, [0, 1], 0, positions, visible)], kv)
