"""Speculative output is the target's own, token for token and in distribution, whatever the drafter believes.

The target and the drafter are tables: the logits of the next token given the last one, over a vocabulary of a few
tokens.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.stats import chisquare

from cluster.core.batch_plan import DraftShape
from cluster.core.paired_cache import Coupling
from cluster.core.sampling import SamplingParams
from cluster.engine.batch import PagedRow
from cluster.engine.sampler import Sampler, SampleRow
from cluster.speculation.chain import Chain, DraftChooser, draft_chains
from cluster.speculation.protocol import DraftTask
from cluster.speculation.tree import TreeShape, draft_trees
from tests.support.walking import walked
from tests.unit.core.test_drafts import spelled

Array = npt.NDArray[np.float64]
VOCAB = 5
PROMPT = (2,)
TARGET = torch.tensor(np.random.RandomState(0).normal(0, 1.2, (VOCAB, VOCAB)), dtype=torch.float32)
NEAR = TARGET + torch.tensor(np.random.RandomState(1).normal(0, 0.5, (VOCAB, VOCAB)), dtype=torch.float32)
FAR = torch.tensor(np.random.RandomState(2).normal(0, 2.0, (VOCAB, VOCAB)), dtype=torch.float32)
SHAPE = DraftShape(Coupling.INDEPENDENT, 0, 2, None)
SAMPLER = Sampler(VOCAB)


class TableModel:
    """A drafter of table [target vocabulary, draft vocabulary]."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def begin(self, tasks: list[DraftTask], drafting: list[int]) -> torch.Tensor:
        return self.table[[tasks[i].tokens[-1] for i in drafting]]

    def feed(self, chains: list[Chain]) -> torch.Tensor:
        return self.table[[chain.drafts[-1] for chain in chains]]

    def grow(self, rows: list[PagedRow], parents: list[int]) -> torch.Tensor:
        return self.table[[token for row in rows for token in row.tokens]]


def speculate(
    params: SamplingParams,
    seeds: int,
    length: int,
    drafter: torch.Tensor,
    d2t: list[int] | None,
    k: int,
    tree: TreeShape | None = None,
) -> tuple[list[tuple[int, ...]], int, int]:
    """`length` tokens for each seed, in one batch; also how deep drafts were made and accepted."""
    chooser, model = DraftChooser(SAMPLER, None if d2t is None else torch.tensor(d2t)), TableModel(drafter)
    outputs: list[list[int]] = [[] for _ in range(seeds)]
    made = accepted = 0
    while going := [seed for seed in range(seeds) if len(outputs[seed]) < length]:
        tasks = []
        for seed in going:
            tokens = (*PROMPT, *outputs[seed])
            room = length - len(outputs[seed]) - 1
            tasks.append(DraftTask(str(seed), tokens, 0, len(tokens), min(k, room), params, seed, len(PROMPT)))
        if tree is None:
            drafts = draft_chains(tasks, SHAPE, chooser, model)
        else:
            drafts = draft_trees(tasks, SHAPE, tree, chooser, model)
        rows, last = [], []
        for seed, draft in zip(going, drafts, strict=True):
            for path in ((), *spelled(draft)):
                position = 1 + len(outputs[seed]) + len(path)
                rows.append(SampleRow(params, seed, position, PROMPT, tuple(outputs[seed]), path))
                last.append((*PROMPT, *outputs[seed], *path)[-1])
        sampled = iter(SAMPLER.sample(TARGET[last], rows).tokens)
        for seed, draft in zip(going, drafts, strict=True):
            walk = walked(draft, [next(sampled) for _ in range(len(draft) + 1)])
            outputs[seed] += walk.tokens
            made, accepted = made + draft.depth, accepted + len(walk.path)
    return [tuple(output[:length]) for output in outputs], made, accepted


def plain(params: SamplingParams, seeds: int, length: int) -> list[tuple[int, ...]]:
    outputs: list[tuple[int, ...]] = [() for _ in range(seeds)]
    for p in range(length):
        rows = [SampleRow(params, seed, 1 + p, PROMPT, outputs[seed]) for seed in range(seeds)]
        tokens = SAMPLER.sample(TARGET[[(*PROMPT, *output)[-1] for output in outputs]], rows).tokens
        outputs = [(*output, token) for output, token in zip(outputs, tokens, strict=True)]
    return outputs


HOT = SamplingParams(max_tokens=9)
PARAMS = {
    "greedy": replace(HOT, temperature=0.0),
    "hot": replace(HOT, temperature=1.4),
    "truncated": replace(HOT, temperature=0.9, top_k=4, top_p=0.9, min_p=0.05),
    "penalised": replace(HOT, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
}
DRAFTERS = {
    "near": (NEAR, None),
    "far": (FAR, None),
    "half_the_vocabulary": (NEAR[:, [0, 2, 3]], [0, 2, 3]),
    "broken": (torch.full((VOCAB, VOCAB), torch.nan), None),
}


TREES = {"chains": None, "trees": TreeShape(2, 5), "wide trees": TreeShape(4, 20)}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("params", PARAMS)
def test_a_seed_gives_the_same_tokens_with_and_without_speculation(
    params: str, drafter: str, tree: TreeShape | None
) -> None:
    table, d2t = DRAFTERS[drafter]
    for k in (1, 2):
        output, made, _ = speculate(PARAMS[params], 40, 8, table, d2t, k, tree)
        assert output == plain(PARAMS[params], 40, 8)
        assert (made > 0) == (drafter != "broken")


@pytest.mark.parametrize("params", ["hot", "truncated", "penalised"])
def test_the_wider_the_tree_the_more_is_accepted(params: str) -> None:
    chains, narrow, wide = (speculate(PARAMS[params], 100, 8, FAR, None, 2, tree)[2] for tree in TREES.values())
    assert chains < narrow < wide


@pytest.mark.parametrize("params", PARAMS)
def test_a_drafter_that_believes_what_the_target_does_is_always_right(params: str) -> None:
    """It draws with the same parameters, penalties for its own drafts included, and the same clocks."""
    _, made, accepted = speculate(PARAMS[params], 60, 8, TARGET, None, 2)
    assert accepted == made > 0


def target_distribution(params: SamplingParams, output: tuple[int, ...]) -> Array:
    """Probabilities [V] of the token after PROMPT and `output`, from the definitions of the parameters."""
    logits = TARGET[(*PROMPT, *output)[-1]].double().numpy().copy()
    for token in {*PROMPT, *output}:
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        logits[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    weights = np.exp(logits / params.temperature)
    if params.top_k is not None:
        weights[weights < np.sort(weights)[-params.top_k]] = 0
    order = np.argsort(-weights)
    mass = np.cumsum(weights[order]) / weights.sum()
    weights[order[1:][mass[:-1] >= params.top_p]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


TRUNCATED = replace(HOT, temperature=1.1, top_k=4, top_p=0.9, min_p=0.1)
CASES = {
    "temperature": (34_000, replace(HOT, temperature=0.8), NEAR, None),
    "all else, d2t": (
        12_000,
        replace(TRUNCATED, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3),
        NEAR[:, [0, 2, 3]],
        [0, 2, 3],
    ),
}


@pytest.mark.parametrize("tree", [None, TreeShape(2, 3)], ids=["chains", "trees"])
@pytest.mark.parametrize("case", CASES)
def test_the_distribution_is_the_targets(case: str, tree: TreeShape | None) -> None:
    """Chi-square of over 100,000 tokens, three for each request, against the exact joint distribution."""
    seeds, params, table, d2t = CASES[case]
    output, _, accepted = speculate(params, seeds, 3, table, d2t, 2, tree)
    assert accepted > 0
    counts = np.zeros((VOCAB, VOCAB, VOCAB))
    np.add.at(counts, tuple(np.array(output).T), 1)
    expected = np.zeros_like(counts)
    first = target_distribution(params, ())
    for a, b in np.ndindex(VOCAB, VOCAB):
        second = target_distribution(params, (a,))[b]
        expected[a, b] = len(output) * first[a] * second * target_distribution(params, (a, b))
    assert not counts[expected == 0].any()
    rare = expected < 5
    cells = [np.append(each[~rare], each[rare].sum()) for each in (counts, expected)]
    cells = [each[cells[1] > 0] for each in cells]
    assert chisquare(*cells).pvalue > 1e-3


def test_racing_with_the_targets_clocks_is_accepted_more_often_than_chance() -> None:
    """The bound of Daliri et al.: agreement with probability at least (1 - TV) / (1 + TV), here at the first token."""
    params = replace(HOT, temperature=1.0)
    seeds = 4000
    task = [DraftTask(str(seed), PROMPT, 0, 1, 1, params, seed, 1) for seed in range(seeds)]
    drafts = draft_chains(task, SHAPE, DraftChooser(SAMPLER), TableModel(NEAR))
    sampled = SAMPLER.sample(TARGET[[2] * seeds], [SampleRow(params, seed, 1) for seed in range(seeds)]).tokens
    agreement = np.mean([draft.tokens[0] == token for draft, token in zip(drafts, sampled, strict=True)])
    p, q = (torch.softmax(table[2].double(), -1) for table in (TARGET, NEAR))
    distance = float((p - q).abs().sum()) / 2
    assert agreement >= (1 - distance) / (1 + distance) - 0.03
    assert agreement > float((p * q).sum()) + 0.1  # what independent draws would give
