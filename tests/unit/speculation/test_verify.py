"""Verification keeps exactly the drafts that the target would have produced itself."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.drafts import NO_DRAFTS, Drafts
from tests.support.walking import walked
from tests.unit.core.test_drafts import TREE, trees

TOKENS = st.integers(0, 3)


@given(st.lists(TOKENS, min_size=1, max_size=8), st.data())
def test_the_longest_agreeing_prefix_and_one_more_token(sampled: list[int], data: st.DataObject) -> None:
    drafts = data.draw(st.lists(TOKENS, min_size=len(sampled) - 1, max_size=len(sampled) - 1))
    walk = walked(Drafts.chain(drafts), sampled)
    m = len(walk.path)
    assert walk.path == list(range(m))
    assert drafts[:m] == sampled[:m]
    assert walk.tokens == sampled[: m + 1]
    assert m == len(drafts) or drafts[m] != sampled[m]


def test_a_later_agreement_does_not_count() -> None:
    assert walked(Drafts.chain([5, 6, 7]), [4, 6, 7, 8]).tokens == [4]


def test_the_walk_goes_to_the_child_that_was_sampled() -> None:
    # Sampled after the last known token, then after each of the six nodes.
    walk = walked(TREE, [7, 2, 0, 9, 5, 9, 6])
    assert walk.path == [0, 3, 5]
    assert walk.tokens == [7, 2, 5, 6]
    assert walked(TREE, [8, 2, 3, 9, 5, 4, 6]).tokens == [8, 3, 4]
    assert walked(TREE, [9, 2, 3, 9, 5, 4, 6]).tokens == [9]
    assert walked(NO_DRAFTS, [3]).tokens == [3]


@given(trees(), st.integers(0, 2**32))
def test_a_tree_yields_what_plain_decoding_yields(tree: Drafts, seed: int) -> None:
    """As far as any path of the tree agrees with it, whatever is sampled off that path. Of siblings that say the same,
    only the first is gone to."""

    def choice(prefix: tuple[int, ...]) -> int:
        return hash((seed, prefix)) % 3

    prefixes = [tuple(tree.tokens[each] for each in tree.path(node)) for node in (None, *range(len(tree)))]
    walk = walked(tree, [choice(prefix) for prefix in prefixes])
    plain: tuple[int, ...] = ()
    while plain in prefixes:
        plain += (choice(plain),)
    if len(set(prefixes)) < len(prefixes):
        plain = plain[: len(walk.tokens)]
    assert tuple(walk.tokens) == plain
    assert tuple(tree.tokens[node] for node in walk.path) == plain[:-1]
