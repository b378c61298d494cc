"""What the cache refuses: calls that would break an invariant, and pools that can't be paired."""

import pytest

from cluster.core.handle import Coupling, HandleStatus
from cluster.core.paired_cache import PairedCache, PoolSpec
from tests.unit.core.oracle import make_pair, serve, start


@pytest.mark.parametrize("span", [1, 2, 3])
def test_positions_whose_lookahead_is_unknown_cannot_be_committed(span: int) -> None:
    oracle = make_pair(span)
    request = start(oracle, range(8))
    assert oracle.cache.reserve(request.handle, 8, 8) is not None
    with pytest.raises(ValueError, match="determined by known tokens"):
        oracle.cache.commit(request.handle, 8, 9 - span)


def test_positions_that_were_not_reserved_cannot_be_committed() -> None:
    oracle = make_pair()
    request = start(oracle, range(20))
    assert oracle.cache.reserve(request.handle, 4, 4) is not None
    with pytest.raises(ValueError, match="only 4 are reserved"):
        oracle.cache.commit(request.handle, 5, 4)


def test_a_handle_claims_once_and_reserves_one_step_at_a_time() -> None:
    oracle = make_pair()
    request = start(oracle, range(8))
    with pytest.raises(ValueError, match="only an idle handle can claim"):
        oracle.cache.claim(request.handle)
    assert oracle.cache.reserve(request.handle, 4, 4) is not None
    with pytest.raises(ValueError, match="its last reservation closed"):
        oracle.cache.reserve(request.handle, 4, 4)


def test_freeing_is_final_and_idempotent() -> None:
    oracle = make_pair()
    request = start(oracle, range(8))
    request.finish_prefill()
    for _ in range(2):
        oracle.cache.free(request.handle)
        oracle.cache.suspend(request.handle)
        assert request.handle.status is HandleStatus.CLOSED
    oracle.cache.check()


def test_a_probe_changes_nothing_not_even_the_order_of_eviction() -> None:
    oracle = make_pair(blocks=8)
    serve(oracle, range(100, 116))
    serve(oracle, range(200, 216))
    asked = oracle.cache.open("asked", range(100, 116))
    for _ in range(5):
        assert oracle.cache.probe(asked).joint == 15
    assert oracle.cache.pools["target"].allocate(4) is not None
    assert oracle.cache.probe(asked).target == 0, "asking isn't using"


def test_independent_cursors_start_where_each_pool_is() -> None:
    oracle = make_pair(span=0, coupling=Coupling.INDEPENDENT)
    serve(oracle, range(20))
    oracle.cache.pools["draft"].tree.evict(3)
    request = start(oracle, range(20))
    assert (request.handle.cursor("target"), request.handle.cursor("draft")) == (19, 8)
    request.finish_prefill()
    oracle.check_handle(request.handle)


def test_without_reports_nothing_is_hashed() -> None:
    cache = PairedCache(PoolSpec("target", 4, 8), reports=False)
    handle = cache.open("a", range(9))
    cache.claim(handle)
    assert cache.reserve(handle, 9) is not None
    cache.commit(handle, 9)
    cache.free(handle)
    assert not cache.snapshot().stored
    assert cache.probe(cache.open("b", range(9))).target == 8


@pytest.mark.parametrize(
    ("names", "span", "coupling", "problem"),
    [
        (("draft", None), 0, Coupling.NONE, "must be named 'target'"),
        (("target", "target"), 0, Coupling.JOINT, "must be named 'target'"),
        (("target", None), 1, Coupling.NONE, "must be 0"),
        (("target", None), 0, Coupling.JOINT, "must be none exactly"),
        (("target", "draft"), 0, Coupling.NONE, "must be none exactly"),
    ],
)
def test_pools_that_cannot_be_paired_are_refused(
    names: tuple[str, str | None], span: int, coupling: Coupling, problem: str
) -> None:
    draft = None if names[1] is None else PoolSpec(names[1], 4, 8)
    with pytest.raises(ValueError, match=problem):
        PairedCache(PoolSpec(names[0], 4, 8, span), draft, coupling)
