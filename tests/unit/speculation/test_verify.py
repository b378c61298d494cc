"""Verification keeps exactly the drafts that the target would have produced itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.speculation.verify import verify
from tests.unit.core.test_drafts import TREE, trees

TOKENS = st.integers(0, 3)


@given(st.lists(TOKENS, min_size=1, max_size=8), st.data())
def test_the_longest_agreeing_prefix_and_one_more_token(sampled: list[int], data: st.DataObject) -> None:
    drafts = data.draw(st.lists(TOKENS, min_size=len(sampled) - 1, max_size=len(sampled) - 1))
    verdict = verify(Drafts.chain(drafts), sampled)
    m = len(verdict.path)
    assert verdict.path == tuple(range(m))
    assert drafts[:m] == sampled[:m]
    assert verdict.tokens == tuple(sampled[: m + 1])
    assert m == len(drafts) or drafts[m] != sampled[m]


def test_a_later_agreement_does_not_count() -> None:
    assert verify(Drafts.chain([5, 6, 7]), [4, 6, 7, 8]).tokens == (4,)


def test_the_walk_goes_to_the_child_that_was_sampled() -> None:
    # Sampled after the last known token, then after each of the six nodes.
    verdict = verify(TREE, [7, 2, 0, 9, 5, 9, 6])
    assert verdict.path == (0, 3, 5)
    assert verdict.tokens == (7, 2, 5, 6)
    assert verify(TREE, [8, 2, 3, 9, 5, 4, 6]).tokens == (8, 3, 4)
    assert verify(TREE, [9, 2, 3, 9, 5, 4, 6]).tokens == (9,)
    assert verify(NO_DRAFTS, [3]).tokens == (3,)


@given(trees(), st.integers(0, 2**32))
def test_a_tree_yields_what_plain_decoding_yields(tree: Drafts, seed: int) -> None:
    """As far as any path of the tree agrees with it, whatever is sampled off that path."""

    def choice(prefix: tuple[int, ...]) -> int:
        return hash((seed, prefix)) % 3

    prefixes = [tuple(tree.tokens[each] for each in tree.path(node)) for node in (None, *range(len(tree)))]
    verdict = verify(tree, [choice(prefix) for prefix in prefixes])
    plain: tuple[int, ...] = ()
    while plain in prefixes:
        plain += (choice(plain),)
    assert verdict.tokens == plain
    assert tuple(tree.tokens[node] for node in verdict.path) == plain[:-1]


@pytest.mark.parametrize("sampled", [[1, 2], [1, 2, 3, 4]])
def test_rows_that_do_not_fit_the_drafts_are_refused(sampled: list[int]) -> None:
    with pytest.raises(ValueError, match="3 sampled tokens"):
        verify(Drafts.chain([1, 2]), sampled)
