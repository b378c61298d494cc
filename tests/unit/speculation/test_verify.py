"""Verification keeps exactly the drafts that the target would have produced itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.speculation.verify import verify

TOKENS = st.integers(0, 3)


@given(st.lists(TOKENS, min_size=1, max_size=8), st.data())
def test_the_longest_agreeing_prefix_and_one_more_token(sampled: list[int], data: st.DataObject) -> None:
    drafts = data.draw(st.lists(TOKENS, min_size=len(sampled) - 1, max_size=len(sampled) - 1))
    verdict = verify(drafts, sampled)
    m = verdict.accepted
    assert drafts[:m] == sampled[:m]
    assert verdict.tokens == tuple(sampled[: m + 1])
    assert m == len(drafts) or drafts[m] != sampled[m]


def test_a_later_agreement_does_not_count() -> None:
    assert verify([5, 6, 7], [4, 6, 7, 8]).tokens == (4,)


@pytest.mark.parametrize("sampled", [[1, 2], [1, 2, 3, 4]])
def test_rows_that_do_not_fit_the_drafts_are_refused(sampled: list[int]) -> None:
    with pytest.raises(ValueError, match="3 sampled tokens"):
        verify([1, 2], sampled)
