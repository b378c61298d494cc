"""The prefix map against a plain model of sets, its cap, and its workers' comings and goings."""

import sys
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.prefix_map import Depth, PrefixMap
from tests.unit.routing.builders import chain, states

LONG = chain(*range(40))
LONGER = chain(*range(400))


def test_depths_are_exact_for_each_worker_and_pool() -> None:
    prefixes = PrefixMap()
    for name, target, draft in (("a", 40, 12), ("b", 7, 0), ("c", 39, 39), ("d", 1, 1)):
        prefixes.reset(name)
        prefixes.store(name, states(LONG, target, draft))
    assert prefixes.depths(LONG) == {"a": Depth(40, 12), "b": Depth(7, 0), "c": Depth(39, 39), "d": Depth(1, 1)}
    assert prefixes.depths(LONG[:5]) == {"a": Depth(5, 5), "b": Depth(5, 0), "c": Depth(5, 5), "d": Depth(1, 1)}
    assert prefixes.depths(chain("other")) == {}
    assert prefixes.depths(()) == {}


def test_forks_share_only_what_comes_before_them() -> None:
    prefixes = PrefixMap()
    prefixes.reset("a")
    prefixes.store("a", states(chain(1, 2, 3, 4)))
    assert prefixes.depths(chain(1, 2, "x", 4)) == {"a": Depth(2, 0)}


def test_a_dropped_worker_is_gone_at_once_and_its_slot_starts_empty() -> None:
    prefixes = PrefixMap()
    prefixes.reset("a")
    prefixes.store("a", states(LONG))
    prefixes.drop("a")
    assert prefixes.depths(LONG) == {}
    prefixes.reset("b")
    assert prefixes.depths(LONG) == {}, "a new worker may not inherit the bits of a dead one"
    while prefixes.sweep(budget=7):
        pass
    prefixes.sweep()
    assert len(prefixes) == 0, "a sweep gives the memory of the dead back"
    prefixes.reset("c")
    assert prefixes.depths(LONG) == {}


def test_slots_are_used_again_after_a_sweep() -> None:
    prefixes = PrefixMap()
    for life in range(50):
        prefixes.reset("a")
        prefixes.store("a", states(LONG[: life % 3 + 1]))
        while prefixes.sweep():
            pass
        prefixes.sweep()
    assert prefixes.depths(LONG) == {"a": Depth(2, 0)}
    assert max(prefixes._slots.values()) <= 2, "holder bits may not grow with the number of restarts"


def test_the_cap_is_hard_and_what_was_just_used_stays() -> None:
    prefixes = PrefixMap(max_blocks=100)
    prefixes.reset("a")
    kept = chain("kept", 1, 2, 3)
    prefixes.store("a", states(kept))
    for other in range(50):
        prefixes.store("a", states(chain(other, 1, 2, 3, 4, 5)))
        prefixes.touch(kept)
        assert len(prefixes) <= 100
    assert prefixes.depths(kept) == {"a": Depth(4, 0)}
    assert prefixes.depths(chain(0, 1, 2, 3, 4, 5)) == {}
    assert prefixes.blocks_of("a") == len(prefixes)


def test_leaves_go_before_their_roots() -> None:
    prefixes = PrefixMap(max_blocks=10)
    prefixes.reset("a")
    prefixes.store("a", states(chain(*range(8))))
    prefixes.store("a", states(chain("x", 1, 2, 3, 4)))
    assert prefixes.depths(chain(*range(8))) == {"a": Depth(3, 0)}, "one generation of five went"


def test_memory_stays_flat_under_churn() -> None:
    """Blocks come and go ten times as many as there is room for; dicts kept in order of use would grow by half."""
    prefixes = PrefixMap(max_blocks=20_000)
    prefixes.reset("a")

    def churn(rounds: range) -> int:
        sizes = []
        for number in rounds:
            keys = chain(number, *range(99))
            prefixes.store("a", states(keys))
            prefixes.remove("a", keys[50:])
            sizes.append(sum(map(sys.getsizeof, (*prefixes._table.young, *prefixes._table.old))))
        return max(sizes)

    early = churn(range(1000))
    assert churn(range(1000, 3000)) <= early
    assert len(prefixes) <= 20_000


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), min_size=1, max_size=90))
def test_a_survey_is_refined_to_the_exact_depth(depths: list[tuple[int, int]]) -> None:
    prefixes = PrefixMap()
    for worker, (target, draft) in enumerate(depths):
        prefixes.reset(f"w{worker}")
        prefixes.store(f"w{worker}", states(LONGER, target, draft))
    exact = prefixes.depths(LONGER)
    rough, slack = prefixes.survey(LONGER)
    assert rough.keys() == exact.keys()
    assert {name: prefixes.refine(name, LONGER, depth, slack) for name, depth in rough.items()} == exact
    assert slack <= len(LONGER) // 32 + 1


NAMES = ("a", "b", "c")
PATHS = [chain(*path) for path in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0), (1, 1, 1, 1, 1), (1, 0))]
ACTION = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(NAMES), st.sampled_from(PATHS), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.sampled_from(NAMES)),
    st.tuples(st.just("sweep"), st.integers(1, 4)),
)


class PlainMap:
    """What the map should say, as sets: worker -> (target blocks, draft blocks)."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[set[bytes], set[bytes]]] = {}

    def store(self, name: str, path: Sequence[bytes], target: int, draft: int) -> None:
        for pool, depth in zip(self.held.setdefault(name, (set(), set())), (target, draft), strict=True):
            reported = set(path[: max(target, draft)])
            pool -= reported
            pool |= reported & set(path[:depth])

    def holders(self, key: bytes) -> dict[str, tuple[bool, bool]]:
        return {name: (key in t, key in d) for name, (t, d) in self.held.items() if key in t | d}


@given(st.lists(ACTION, max_size=40))
def test_any_history_agrees_with_a_plain_model(actions: list[tuple[Any, ...]]) -> None:
    prefixes, plain = PrefixMap(), PlainMap()
    for action in actions:
        match action:
            case "store", name, path, target, draft:
                if name not in plain.held:
                    prefixes.reset(name)
                prefixes.store(name, states(path, target, draft))
                plain.store(name, path, target, draft)
            case "drop", name:
                prefixes.drop(name)
                plain.held.pop(name, None)
            case "sweep", budget:
                prefixes.sweep(budget)
    for key in {key for path in PATHS for key in path}:
        assert prefixes.holders(key) == plain.holders(key)
    for name, (target, _) in plain.held.items():
        assert prefixes.blocks_of(name) == len(target)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=12), st.integers(0, 40))
def test_bisection_finds_every_depth(depths: list[tuple[int, int]], length: int) -> None:
    prefixes = PrefixMap()
    for worker, (target, draft) in enumerate(depths):
        prefixes.reset(f"w{worker}")
        prefixes.store(f"w{worker}", states(LONG, target, draft))
    expected = {
        f"w{worker}": Depth(min(target, length), min(draft, length))
        for worker, (target, draft) in enumerate(depths)
        if length and (target or draft)
    }
    assert prefixes.depths(LONG[:length]) == expected
