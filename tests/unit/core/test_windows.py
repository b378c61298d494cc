"""Pools with a sliding window: what is kept, what can be given away, and from where a request can go on."""

import pytest

from cluster.core.handle import Coupling
from cluster.core.paired_cache import PairedCache, PoolSpec
from tests.unit.core.oracle import OracleTensors, Sequencer, serve, start


def windowed(window: int | None, blocks: int = 64, draft: PoolSpec | None = None) -> OracleTensors:
    """A target pool of blocks of 4."""
    coupling = Coupling.NONE if draft is None else Coupling.JOINT
    return OracleTensors(PairedCache(PoolSpec("target", 4, blocks, window=window), draft, coupling))


def depth(oracle: OracleTensors, prompt: range) -> int:
    return oracle.cache.probe(oracle.cache.open("probe", prompt)).target


def long_request(oracle: OracleTensors, tokens: int) -> Sequencer:
    request = start(oracle, range(8))
    request.finish_prefill()
    request.say(range(8, tokens))
    return request


@pytest.mark.parametrize(("window", "kept"), [(1, 2), (4, 3), (5, 4), (8, 5), (16, 9), (None, 25)])
def test_a_request_keeps_two_windows_at_most(window: int | None, kept: int) -> None:
    oracle = windowed(window)
    long_request(oracle, 100)
    meters = oracle.cache.meters()["target"]
    assert meters.in_use <= kept
    assert meters.in_use + meters.cached == 25, "the rest can be reused, or evicted"


def test_what_lies_behind_the_window_goes_first_and_the_request_goes_on() -> None:
    oracle = windowed(8, blocks=30)
    request = long_request(oracle, 100)
    other = start(oracle, range(200, 260))
    other.finish_prefill()
    oracle.check_handle(request.handle)
    assert depth(oracle, range(100)) == 96
    request.say(range(100, 120))
    oracle.check_handle(request.handle)
    oracle.check_published()
    oracle.cache.check()


def test_a_claim_needs_the_blocks_that_the_window_sees_and_no_others() -> None:
    oracle = windowed(8)
    request = long_request(oracle, 100)
    oracle.cache.pools["target"].tree.evict(64)
    assert depth(oracle, range(99)) == 96, "behind the window, nothing is needed"
    assert depth(oracle, range(60)) == 0, "the end of this prefix was given away"
    request.end()
    again = start(oracle, range(110))
    assert again.handle.cursor("target") == 99
    again.finish_prefill()
    oracle.check_handle(again.handle)


def test_a_gap_in_the_middle_is_filled_by_whoever_computes_it_again() -> None:
    oracle = windowed(8)
    request = long_request(oracle, 100)
    oracle.cache.pools["target"].tree.evict(64)
    again = start(oracle, range(60))
    assert again.handle.cursor("target") == 0
    again.finish_prefill()
    oracle.check_published()
    oracle.cache.check()
    assert depth(oracle, range(58)) == 57
    for each in (again, request):
        each.end()
    assert depth(oracle, range(100)) == 99


def test_both_pools_end_where_both_can_go_on() -> None:
    """The draft's pool lost what it would need at the depth that the target allows; both fall back to where it can."""
    oracle = windowed(None, draft=PoolSpec("draft", 4, 64, 1, window=6))
    request = long_request(oracle, 60)
    oracle.cache.pools["draft"].tree.evict(64)
    shorter = oracle.cache.probe(oracle.cache.open("shorter", range(40)))
    assert (shorter.target, shorter.joint) == (39, 0)
    request.end()
    longer = oracle.cache.probe(oracle.cache.open("longer", range(60)))
    assert (longer.target, longer.joint) == (59, 59)


def test_a_request_longer_than_its_pool() -> None:
    oracle = windowed(8, blocks=8)
    serve(oracle, range(8), range(8, 200))
    oracle.cache.check()


def test_blocks_that_nobody_will_read_leave_with_their_last_descendant() -> None:
    oracle = windowed(8)
    request = long_request(oracle, 100)
    oracle.cache.pools["target"].tree.evict(64)
    request.end()
    oracle.cache.pools["target"].tree.evict(64)
    assert not list(oracle.cache.pools["target"].tree.runs())
    assert oracle.cache.meters()["target"].free == 64
    assert not oracle.cache.snapshot().stored
