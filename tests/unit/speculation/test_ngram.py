"""Prompt lookup proposes what followed the latest occurrence of the longest repeated suffix."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.sampling import SamplingParams
from cluster.speculation.ngram import NgramDrafter
from cluster.speculation.protocol import DraftTask

FEW = st.lists(st.integers(0, 2), max_size=40)
PARAMS = SamplingParams(max_tokens=8)


def task(tokens: Sequence[int], k: int = 3, request_id: str = "r") -> DraftTask:
    return DraftTask(request_id, tokens, 0, 0, k, PARAMS, 0, 0)


def looked_up(tokens: Sequence[int], k: int, least: int, most: int) -> tuple[int, ...]:
    """The definition, written as a search."""
    for n in range(most, least - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[len(tokens) - n :]:
                return tuple(tokens[start + n : start + n + k])
    return ()


@given(FEW, st.integers(1, 3), st.integers(0, 2), st.integers(1, 5))
def test_it_equals_a_plain_search(tokens: list[int], least: int, more: int, k: int) -> None:
    drafter = NgramDrafter(k, least, least + more)
    assert drafter.propose([task(tokens, k)]) == [Drafts.chain(looked_up(tokens, k, least, least + more))]


@given(FEW, st.lists(st.integers(1, 4), max_size=10))
def test_growing_step_by_step_changes_nothing(tokens: list[int], steps: list[int]) -> None:
    """The index grows by what is new; a drafter that sees all tokens at once (after reuse or a resume) agrees."""
    grown = NgramDrafter(3, 1, 3)
    end = 0
    for step in [*steps, len(tokens)]:
        end = min(len(tokens), end + step)
        assert grown.propose([task(tokens[:end])]) == NgramDrafter(3, 1, 3).propose([task(tokens[:end])])


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    tokens = [1, 2, 3, 9, 9, 3, 7, 7, 1, 2, 3]
    assert NgramDrafter(2, 1, 3).propose([task(tokens, 2)]) == [Drafts.chain((9, 9))]
    assert NgramDrafter(2, 1, 1).propose([task(tokens, 2)]) == [Drafts.chain((7, 7))]


def test_k_bounds_the_drafts_and_zero_asks_for_none() -> None:
    drafter = NgramDrafter(5, 1, 2)
    tokens = [1, 2, 3, 4, 5, 1]
    assert drafter.propose([task(tokens, 2), task(tokens, 0)]) == [Drafts.chain((2, 3)), NO_DRAFTS]


def test_requests_do_not_share_an_index_and_forgetting_frees_it() -> None:
    drafter = NgramDrafter(2, 1, 2)
    drafter.propose([task([1, 2, 1], request_id="a")])
    assert drafter.propose([task([3, 1], request_id="b")]) == [NO_DRAFTS]
    drafter.forget("a")
    drafter.forget("a")
    assert drafter.propose([task([1], request_id="a")]) == [NO_DRAFTS]


def test_an_id_used_again_starts_afresh() -> None:
    drafter = NgramDrafter(2, 1, 2)
    drafter.propose([task([1, 2, 3, 4, 1])])
    drafter.forget("r")
    assert drafter.propose([task([2, 9, 1])]) == [NO_DRAFTS]
