"""Claims across a gap: the hole takes no blocks, lies between whole blocks, and nothing after it is published."""

import pytest

from cluster.core.handle import Coupling
from tests.unit.core.oracle import OracleTensors, Sequencer, make_pair, serve, start


def skipping(oracle: OracleTensors, prompt: range) -> Sequencer:
    """A request that was suspended, and claims across the gap."""
    request = start(oracle, prompt)
    oracle.cache.suspend(request.handle)
    request.claim(skip_gap=True)
    oracle.check_handle(request.handle)
    return request


def hole_of(request: Sequencer) -> range | None:
    return request.handle.holdings["draft"].hole


@pytest.mark.parametrize("span", [0, 1, 2, 4])
@pytest.mark.parametrize(("size", "draft_size"), [(4, 4), (4, 8), (8, 4), (4, 3)])
def test_a_hole_takes_no_blocks_and_both_pools_start_behind_it(span: int, size: int, draft_size: int) -> None:
    oracle = make_pair(span, size, draft_block_size=draft_size)
    serve(oracle, range(60))
    oracle.cache.pools["draft"].tree.evict(4)
    held = oracle.cache.probe(oracle.cache.open("probe", range(60))).draft
    request = skipping(oracle, range(60))
    begin = (60 - max(span, 1)) // draft_size * draft_size
    assert held is not None
    assert hole_of(request) == range(held // draft_size * draft_size, begin)
    assert request.handle.cursor("target") == request.handle.cursor("draft") == begin
    assert oracle.cache.meters()["draft"].in_use == held // draft_size
    request.finish_prefill()
    assert oracle.cache.meters()["draft"].in_use <= held // draft_size + 2 + 60 % draft_size


def test_nothing_after_a_hole_is_published_but_the_targets_blocks_are() -> None:
    oracle = make_pair()
    serve(oracle, range(20))
    oracle.cache.pools["draft"].tree.evict(100)
    request = skipping(oracle, range(20))
    request.finish_prefill()
    request.say(range(30, 60))
    request.end()
    oracle.check_published()
    again = oracle.cache.probe(oracle.cache.open("again", [*range(20), *range(30, 60)]))
    assert (again.target, again.draft) == (49, 0)
    assert oracle.cache.meters()["draft"].free == 64, "all blocks behind the hole came back"


def test_the_next_claim_starts_afresh() -> None:
    oracle = make_pair()
    serve(oracle, range(20))
    oracle.cache.pools["draft"].tree.evict(100)
    request = skipping(oracle, range(20))
    oracle.cache.suspend(request.handle)
    request.claim()
    assert hole_of(request) is None and request.handle.cursor("target") == 0
    request.finish_prefill()
    request.end()
    assert oracle.cache.probe(oracle.cache.open("again", range(20))).joint == 19


@pytest.mark.parametrize("evicted", [0, 1])
def test_a_draft_that_is_not_a_block_behind_leaves_no_hole(evicted: int) -> None:
    oracle = make_pair()
    serve(oracle, range(20), answer=())
    oracle.cache.pools["draft"].tree.evict(evicted)
    request = skipping(oracle, range(20))
    assert hole_of(request) is None
    assert request.handle.cursor("target") == (19, 16)[evicted]


def test_an_independent_draft_catches_up_whatever_is_asked() -> None:
    oracle = make_pair(0, coupling=Coupling.INDEPENDENT)
    serve(oracle, range(20))
    oracle.cache.pools["draft"].tree.evict(3)
    request = skipping(oracle, range(20))
    assert hole_of(request) is None
    assert (request.handle.cursor("target"), request.handle.cursor("draft")) == (19, 8)


def test_a_target_that_lost_blocks_meanwhile_shortens_the_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair()
    serve(oracle, range(20))
    oracle.cache.pools["draft"].tree.evict(100)
    request = start(oracle, range(20))
    oracle.cache.suspend(request.handle)
    holding = request.handle.holdings["target"]
    prepare, calls = holding.prepare, []

    def evict_first(depth: int) -> None:
        if not calls:
            oracle.cache.pools["target"].tree.evict(3)
        calls.append(depth)
        prepare(depth)

    monkeypatch.setattr(type(holding), "prepare", lambda self, depth: evict_first(depth) if self is holding else None)
    request.claim(skip_gap=True)
    assert request.handle.cursor("target") == request.handle.cursor("draft") == 8
    assert hole_of(request) == range(8)
    oracle.cache.check()
