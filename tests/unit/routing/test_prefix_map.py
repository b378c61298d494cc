"""The prefix map against a plain model of sets, its cap, and its workers' comings and goings."""

from hypothesis import given
from hypothesis import strategies as st

from cluster.routing.prefix_map import Depth, PrefixMap
from tests.unit.routing.builders import chain, states

LONG = chain(*range(40))


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
    assert prefixes.depths(chain(*range(8))) == {"a": Depth(5, 0)}


NAMES = ("a", "b", "c")
PATHS = [chain(*path) for path in ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0), (1, 1, 1, 1, 1), (1, 0))]
ACTION = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(NAMES), st.sampled_from(PATHS), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("drop"), st.sampled_from(NAMES)),
    st.tuples(st.just("sweep"), st.integers(1, 4)),
)


@given(st.lists(ACTION, max_size=40))
def test_any_history_agrees_with_a_plain_model(actions: list[tuple]) -> None:
    prefixes = PrefixMap()
    held: dict[str, tuple[set[bytes], set[bytes]]] = {}
    for action in actions:
        match action:
            case "store", name, path, target, draft:
                if name not in held:
                    prefixes.reset(name)
                    held[name] = (set(), set())
                # A report states the whole truth of each of its blocks; a real one is contiguous from the root.
                longest = max(target, draft)
                prefixes.store(name, states(path, max(target, 1), min(draft, longest)))
                for depth, key in enumerate(path):
                    if depth < max(target, 1, draft):
                        (held[name][0].add if depth < max(target, 1) else held[name][0].discard)(key)
                        (held[name][1].add if depth < draft else held[name][1].discard)(key)
            case "drop", name:
                prefixes.drop(name)
                held.pop(name, None)
            case "sweep", budget:
                prefixes.sweep(budget)
    for path in PATHS:
        for key in path:
            expected = {
                name: (key in target, key in draft) for name, (target, draft) in held.items() if key in target | draft
            }
            assert prefixes.holders(key) == expected
    for name in held:
        assert prefixes.blocks_of(name) == len(held[name][0])


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
