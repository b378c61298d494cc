"""Packed keys read like a tuple of shortened ones, and cross a process boundary small."""

import pickle

import pytest

from cluster.routing.packed_keys import KEPT, PackedKeys
from cluster.routing.prefix_map import Depth, PrefixMap
from tests.unit.routing.builders import chain, states

KEYS = chain(*range(100))
SHORT = tuple(key[:KEPT] for key in KEYS)


def test_they_read_like_the_tuple() -> None:
    packed = PackedKeys.of(KEYS)
    assert len(packed) == 100
    assert tuple(packed) == SHORT
    assert packed[7] == SHORT[7]
    for part in (slice(0, 5), slice(90, 200), slice(31, None, 32), slice(None, None, 7), slice(5, 5)):
        assert tuple(packed[part]) == SHORT[part]
    for index in (100, -1):
        with pytest.raises(IndexError):
            packed[index]
    assert len(PackedKeys.of(())) == 0


def test_they_travel_in_nine_bytes_a_block() -> None:
    packed = PackedKeys.of(KEYS)
    wire = pickle.dumps(packed, protocol=5)
    assert pickle.loads(wire) == packed  # noqa: S301  # our own bytes, as Ray carries them
    assert len(wire) < 9 * len(KEYS) + 100


def test_the_map_finds_what_workers_report_under_whole_keys() -> None:
    prefixes = PrefixMap()
    prefixes.reset("a")
    prefixes.store("a", states(KEYS, 80, 33))
    assert prefixes.depths(PackedKeys.of(KEYS)) == {"a": Depth(80, 33)}
    assert prefixes.depths(PackedKeys.of(chain("x", *range(5)))) == {}
