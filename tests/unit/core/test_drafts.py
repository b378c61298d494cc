"""Trees of drafts: what paths they hold, and what is left of them when something is cut off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core.drafts import NO_DRAFTS, Drafts

#     7          8
#   1   2        3
#  (4)  5
TREE = Drafts((7, 8, 1, 2, 3, 5), (None, None, 0, 0, 1, 3))


@st.composite
def trees(draw: st.DrawFn, tokens: int = 3, most: int = 12) -> Drafts:
    """Any tree, children that repeat a token included."""
    count = draw(st.integers(0, most))
    parents = [draw(st.sampled_from([None, *range(node)])) for node in range(count)]
    return Drafts(tuple(draw(st.integers(0, tokens - 1)) for _ in range(count)), tuple(parents))


def spelled(drafts: Drafts) -> list[tuple[int, ...]]:
    """The tokens on the path to each node."""
    return [tuple(drafts.tokens[each] for each in drafts.path(node)) for node in range(len(drafts))]


def test_paths_and_depths() -> None:
    assert spelled(TREE) == [(7,), (8,), (7, 1), (7, 2), (8, 3), (7, 2, 5)]
    assert TREE.depths == (1, 1, 2, 2, 2, 3)
    assert (TREE.depth, NO_DRAFTS.depth) == (3, 0)
    assert TREE.path(None) == ()


def test_a_chain_is_one() -> None:
    chain = Drafts.chain([4, 4, 5])
    assert chain.is_chain and NO_DRAFTS.is_chain and Drafts((1,), (None,)).is_chain
    assert not TREE.is_chain and not Drafts((1, 2), (None, None)).is_chain
    assert chain.depth == 3
    assert chain.within(2) == chain.first(2) == Drafts.chain([4, 4])


def test_what_follows_a_node_that_is_cut_goes_with_it() -> None:
    cut = TREE.only([True, True, True, False, True, True])
    assert spelled(cut) == [(7,), (8,), (7, 1), (8, 3)]


@pytest.mark.parametrize(("tokens", "parents"), [((1,), ()), ((1,), (0,)), ((1, 2), (1, None)), ((1,), (-1,))])
def test_what_is_no_tree_is_refused(tokens: tuple[int, ...], parents: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match="parent"):
        Drafts(tokens, parents)


@given(trees(), st.integers(-1, 13), st.integers(-1, 5), st.data())
def test_whatever_is_cut_off_a_tree_is_left(tree: Drafts, count: int, depth: int, data: st.DataObject) -> None:
    paths = spelled(tree)
    assert spelled(tree.first(count)) == paths[: max(0, count)]
    assert spelled(tree.within(depth)) == [path for path in paths if len(path) <= depth]
    kept = data.draw(st.lists(st.booleans(), min_size=len(tree), max_size=len(tree)))
    assert spelled(tree.only(kept)) == [
        path for node, path in enumerate(paths) if all(kept[each] for each in tree.path(node))
    ]
