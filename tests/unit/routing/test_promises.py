"""Prompts just placed: found by whatever begins like them, until their time."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.prefix_map import Depth
from cluster.routing.promises import Promises
from tests.unit.routing.builders import chain

LONG = chain(*range(40))


def test_a_promise_is_found_at_the_exact_depth_that_is_shared() -> None:
    promises = Promises()
    promises.add("a", LONG[:37], draft=True, until=5.0)
    promises.add("b", (*LONG[:11], *chain("other", 1)), draft=False, until=5.0)
    assert promises.depths(LONG, now=0.0) == {"a": Depth(37, 37), "b": Depth(11, 0)}
    assert promises.depths(LONG[:3], now=0.0) == {"a": Depth(3, 3), "b": Depth(3, 0)}
    assert promises.depths(chain("x"), now=0.0) == {}
    assert promises.depths((), now=0.0) == {}


def test_a_promise_ends_with_its_time_or_its_worker() -> None:
    promises = Promises()
    promises.add("a", LONG, draft=True, until=1.0)
    promises.add("b", LONG, draft=True, until=2.0)
    assert promises.depths(LONG, now=1.0) == {"b": Depth(40, 40)}
    assert len(promises) == 1, "one that ended is forgotten when it is met"
    promises.drop("b")
    assert promises.depths(LONG, now=1.0) == {}
    promises.add("c", LONG, draft=True, until=3.0)
    promises.expire(now=3.0)
    assert len(promises) == 0
    assert not promises._marks, "nothing is left behind"


def test_the_number_kept_is_capped_and_the_oldest_go_first() -> None:
    promises = Promises(limit=3)
    for number in range(5):
        promises.add(f"w{number}", chain(number, 1, 2), draft=True, until=9.0)
    assert len(promises) == 3
    assert promises.depths(chain(1, 1, 2), now=0.0) == {}
    assert promises.depths(chain(4, 1, 2), now=0.0) == {"w4": Depth(3, 3)}


PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=9).map(lambda names: chain(*names))


@given(st.lists(st.tuples(st.sampled_from("xyz"), PATHS, st.booleans()), max_size=8), PATHS)
def test_any_promises_agree_with_a_plain_comparison(
    made: list[tuple[str, tuple[bytes, ...], bool]], keys: tuple[bytes, ...]
) -> None:
    promises, expected = Promises(), dict[str, Depth]()
    for worker, path, draft in made:
        promises.add(worker, path, draft, until=1.0)
        depth = sum(mine == theirs for mine, theirs in zip(path, keys, strict=False))
        if depth:
            known = expected.get(worker, Depth(0, 0))
            expected[worker] = Depth(max(known.target, depth), max(known.draft, depth if draft else 0))
    assert promises.depths(keys, now=0.0) == expected
