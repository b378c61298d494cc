"""Drafts of several positions out of one pass: each request gets its own rows, and each draft its own clocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.paired_cache import Coupling
from cluster.core.sampling import SamplingParams
from cluster.engine.sampler import Sampler, SampleRow
from cluster.speculation.chain import DraftChooser
from cluster.speculation.parallel import draft_parallel
from cluster.speculation.protocol import DraftTask

VOCAB = 12
SAMPLER = Sampler(VOCAB)
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
HOT = SamplingParams(max_tokens=9, temperature=1.3)


class Pass:
    """One pass that guesses, for the request whose first token is r, the logits `guesses[r]` [positions, V]."""

    def __init__(self, guesses: dict[int, Tensor]) -> None:
        self.guesses = guesses
        self.asked: list[tuple[list[str], list[int]]] = []

    def __call__(self, tasks: Sequence[DraftTask], widths: Sequence[int]) -> Tensor:
        self.asked.append(([task.request_id for task in tasks], list(widths)))
        return torch.cat([self.guesses[task.tokens[0]][:width] for task, width in zip(tasks, widths, strict=True)])


def task(first: int, k: int, params: SamplingParams = GREEDY, start: int = 0) -> DraftTask:
    tokens = (first, 4, 5)
    return DraftTask(f"r{first}", tokens, start, len(tokens), k, params, seed=first, num_prompt=2)


def shape(max_positions: int | None = None) -> DraftShape:
    return DraftShape(Coupling.INDEPENDENT, 0, 4, max_positions)


def guesses(seed: int) -> Tensor:
    return torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))


def test_every_request_gets_its_own_rows_in_one_pass() -> None:
    once = Pass({r: guesses(r) for r in range(4)})
    drafts = draft_parallel([task(0, 3), task(1, 0), task(2, 1), task(3, 4)], shape(), DraftChooser(SAMPLER), once)
    assert once.asked == [(["r0", "r1", "r2", "r3"], [3, 0, 1, 4])]
    for r, (k, draft) in enumerate(zip((3, 0, 1, 4), drafts, strict=True)):
        assert draft.tokens == tuple(guesses(r)[:k].argmax(-1).tolist())


def test_each_draft_races_with_the_clocks_of_its_own_position() -> None:
    (drafts,) = draft_parallel([task(0, 4, HOT)], shape(), DraftChooser(SAMPLER), Pass({0: guesses(0)}))
    expected = [SAMPLER.sample(guesses(0)[j : j + 1], [SampleRow(HOT, 0, 3 + j)]).tokens[0] for j in range(4)]
    assert list(drafts.tokens) == expected
    assert expected != guesses(0).argmax(-1).tolist()


def test_penalties_count_the_drafts_before() -> None:
    """A pass that guesses the same token everywhere can't repeat it where repetition is punished."""
    logits = torch.zeros(4, VOCAB)
    logits[:, [7, 8, 9]] = torch.tensor([3.0, 2.0, 1.0])
    params = SamplingParams(max_tokens=9, temperature=0.0, presence_penalty=1.5)
    (drafts,) = draft_parallel([task(0, 4, params)], shape(), DraftChooser(SAMPLER), Pass({0: logits}))
    assert drafts.tokens == (7, 8, 7, 7)


def test_broken_logits_end_the_drafts_of_that_request_only() -> None:
    broken = guesses(0)
    broken[2] = torch.nan
    drafts = draft_parallel([task(0, 4), task(1, 4)], shape(), DraftChooser(SAMPLER), Pass({0: broken, 1: guesses(1)}))
    assert [len(each) for each in drafts] == [2, 4]
    assert drafts[1].tokens == tuple(guesses(1).argmax(-1).tolist())


def test_drafts_end_at_the_last_position() -> None:
    once = Pass({0: guesses(0)})
    (drafts,) = draft_parallel([task(0, 4)], shape(max_positions=4), DraftChooser(SAMPLER), once)
    assert once.asked == [(["r0"], [2])]
    assert len(drafts) == 2


def test_slots_are_written_even_if_nothing_is_drafted() -> None:
    once = Pass({0: guesses(0)})
    (drafts,) = draft_parallel([task(0, 0)], shape(), DraftChooser(SAMPLER), once)
    assert once.asked == [(["r0"], [0])] and not drafts
