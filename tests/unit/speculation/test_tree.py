"""Trees of drafts grow where the draft sees most probability, and never cost what they may not."""

import itertools
import math

import numpy as np
import pytest
import torch

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.paired_cache import Coupling
from cluster.core.sampling import SamplingParams
from cluster.engine.batch import PagedRow
from cluster.engine.sampler import Sampler, SampleRow
from cluster.speculation.chain import DraftChooser, draft_chains
from cluster.speculation.contenders import contenders
from cluster.speculation.protocol import DraftTask
from cluster.speculation.tree import TreeShape, draft_trees
from tests.unit.core.test_drafts import spelled
from tests.unit.speculation.test_lossless import TableModel

VOCAB = 9
TABLE = torch.tensor(np.random.RandomState(3).normal(0, 1.5, (VOCAB, VOCAB)), dtype=torch.float32)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
HOT = SamplingParams(max_tokens=9, temperature=0.9)
SAMPLER = Sampler(VOCAB)


def shape(depth: int, max_positions: int | None = None) -> DraftShape:
    return DraftShape(Coupling.INDEPENDENT, 0, depth, max_positions)


def task(last: int, k: int, params: SamplingParams = GREEDY, seed: int = 1) -> DraftTask:
    tokens = (4, 4, last)
    return DraftTask(f"{last}-{k}", tokens, 0, len(tokens), k, params, seed, len(tokens))


def grow(tasks: list[DraftTask], tree: TreeShape, depth: int = 4, table: torch.Tensor = TABLE) -> list[Drafts]:
    return draft_trees(tasks, shape(depth), tree, DraftChooser(SAMPLER), TableModel(table))


def eagle2(last: int, depth: int, tree: TreeShape) -> set[tuple[int, ...]]:
    """The tree of greedy decoding, from its definition: paths of tokens."""
    log_probs = torch.log_softmax(TABLE.double(), -1)

    def score(path: tuple[int, ...]) -> float:
        return sum(float(log_probs[a, b]) for a, b in itertools.pairwise((last, *path)))

    level: list[tuple[int, ...]] = [()]
    nodes: list[tuple[int, ...]] = []
    for _ in range(depth):
        best = [log_probs[(last, *path)[-1]].topk(tree.top_k).indices.tolist() for path in level]
        children = [(*path, token) for path, tokens in zip(level, best, strict=True) for token in tokens]
        nodes += children
        level = sorted(children, key=score)[-tree.top_k :]
    return set(sorted(nodes, key=score)[-tree.total :])


@pytest.mark.parametrize("tree", [TreeShape(1, 9), TreeShape(2, 6), TreeShape(3, 9), TreeShape(4, 60)])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_greedy_trees_are_those_of_eagle_2(tree: TreeShape, depth: int) -> None:
    for last, drafts in enumerate(grow([task(last, depth) for last in range(VOCAB)], tree)):
        paths = spelled(drafts)
        assert set(paths) == eagle2(last, depth, tree)
        assert len(set(paths)) == len(paths)


def test_the_best_nodes_come_first() -> None:
    """So that a step with room for fewer takes the best tree of that size."""
    (whole,) = grow([task(3, 4)], TreeShape(3, 12))
    for total in range(12):
        (small,) = grow([task(3, 4)], TreeShape(3, total))
        assert whole.first(total) == small


def test_the_narrowest_tree_is_the_chain() -> None:
    tasks = [task(last, 3) for last in range(VOCAB)]
    assert grow(tasks, TreeShape(1, 3)) == draft_chains(tasks, shape(4), DraftChooser(SAMPLER), TableModel(TABLE))


def test_requests_of_one_batch_draft_as_deep_as_each_may() -> None:
    tree = TreeShape(3, 20)
    tasks = [task(1, 2), task(2, 0), task(3, 4), task(4, 1, HOT)]
    together = grow(tasks, tree)
    assert [drafts.depth for drafts in together] == [2, 0, 4, 1]
    assert together == [grow([each], tree)[0] for each in tasks]


def test_the_drafts_last_position_bounds_the_depth() -> None:
    """Three tokens are known: with five positions, drafts 1 and 2 can be fed, and draft 3 follows from them."""
    for positions, depth in ((None, 4), (5, 3), (4, 2), (3, 1), (2, 0)):
        args = [task(1, 4)], shape(4, positions), TreeShape(2, 30), DraftChooser(SAMPLER), TableModel(TABLE)
        assert draft_trees(*args)[0].depth == depth


def test_broken_logits_end_a_branch_or_the_tree() -> None:
    nowhere = TABLE.clone()
    nowhere[5] = torch.nan
    (drafts,) = grow([task(5, 3)], TreeShape(3, 9), table=nowhere)
    assert drafts == NO_DRAFTS
    for path in spelled(grow([task(1, 4)], TreeShape(VOCAB, 99), table=nowhere)[0]):
        assert 5 not in path[:-1]


def test_draft_ids_are_mapped_and_padding_is_never_drafted() -> None:
    ids = torch.tensor([0, 3, 4, 8, 11])
    table = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    chooser = DraftChooser(SAMPLER, ids)
    (drafts,) = draft_trees([task(1, 3)], shape(3), TreeShape(5, 60), chooser, TableModel(table))
    assert set(drafts.tokens) == {0, 3, 4, 8}


class Spy(TableModel):
    """Notes the rows that are fed."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.rows: list[PagedRow] = []

    def grow(self, rows: list[PagedRow], parents: list[int]) -> torch.Tensor:
        self.rows += rows
        return super().grow(rows, parents)


def test_scratch_slots_are_those_that_the_shape_states() -> None:
    for tree, depth in itertools.product((TreeShape(1, 3), TreeShape(3, 7)), (1, 2, 4)):
        spy = Spy()
        draft_trees([task(2, depth)], shape(4), tree, DraftChooser(SAMPLER), spy)
        written = [row.start + i for row in spy.rows for i in range(len(row.tokens))]
        assert written == list(range(3, 3 + tree.scratch(depth)))


def test_positions_go_by_depth_and_nodes_see_their_ancestors() -> None:
    spy = Spy()
    draft_trees([task(2, 4)], shape(4), TreeShape(3, 7), DraftChooser(SAMPLER), spy)
    fed = [token for row in spy.rows for token in row.tokens]
    for level, row in enumerate(spy.rows):
        assert row.positions is not None and row.visible is not None
        assert list(row.positions) == [3 + above for above in range(level + 1) for _ in range(3)]
        for node, sees in enumerate(row.visible.tolist()):
            seen = [slot for slot, visible in enumerate(sees) if visible]
            assert [slot // 3 for slot in seen] == list(range(level + 1))  # one of each level: a path
            assert fed[seen[-1]] == row.tokens[node]
            assert spelled_by(seen, fed) in eagle2(2, 4, TreeShape(3, 99))


def spelled_by(slots: list[int], fed: list[int]) -> tuple[int, ...]:
    return tuple(fed[slot] for slot in slots)


def test_a_drafter_that_believes_what_the_target_does_finds_its_choice() -> None:
    """Sampling: among the first two children nearly always, whatever the temperature, where chance would often fail."""
    rows = [
        SampleRow(SamplingParams(max_tokens=9, temperature=t), seed, 7) for t in (0.5, 1.0, 2.0) for seed in range(300)
    ]
    logits = TABLE[4].repeat(len(rows), 1)
    chosen = SAMPLER.sample(logits, rows).tokens
    found = [[token for token, _ in each] for each in contenders(SAMPLER, logits, rows, 2)]
    hits = np.mean([token in pair for token, pair in zip(chosen, found, strict=True)])
    likeliest = TABLE[4].topk(2).indices.tolist()
    assert hits > 0.95 > 0.8 > np.mean([token in likeliest for token in chosen])


def test_contenders_of_a_truncated_race_are_its_winner_and_what_is_likely() -> None:
    params = SamplingParams(max_tokens=9, temperature=1.0, top_k=1)
    (found,) = contenders(SAMPLER, TABLE[4:5], [SampleRow(params, 3, 7)], 3)
    assert [token for token, _ in found] == TABLE[4].topk(3).indices.tolist()
    assert math.fsum(math.exp(score) for _, score in found) <= 1 + 1e-6


def test_penalties_count_the_drafts_before() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=50.0)
    (drafts,) = draft_trees([task(2, 4, params)], shape(4), TreeShape(2, 30), DraftChooser(SAMPLER), TableModel(TABLE))
    assert all(len(set(path)) == len(path) for path in spelled(drafts))
