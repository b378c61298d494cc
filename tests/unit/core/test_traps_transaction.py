"""The traps of a transaction over several pools, by number: both or neither, exactly once, and nothing lost."""

import random
from typing import Any

import pytest

from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.handle import Coupling, HandleStatus
from cluster.core.holding import Holding
from cluster.core.paired_cache import PairedCache, PoolMeters, PoolSpec, split_budget
from cluster.core.request import FinishReason, RequestStatus
from cluster.errors import PromptTooLarge
from tests.unit.core.oracle import OracleTensors, Sequencer, make_pair, serve, start
from tests.unit.core.oracle_worker import OracleWorker, make_request, reference


def capacities(request: Sequencer) -> list[int]:
    return [holding.capacity for holding in request.handle.holdings.values()]


def in_use(cache: PairedCache) -> list[tuple[int, int]]:
    return [(meters.in_use, meters.reserved) for meters in cache.meters().values()]


def available(cache: PairedCache) -> list[int]:
    """Free and evictable blocks of each pool."""
    return [meters.free + meters.cached for meters in cache.meters().values()]


def refuse(cache: PairedCache, pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the pool grants nothing, though it looks as if it could."""
    monkeypatch.setattr(cache.pools[pool], "allocate", lambda count: None if count else [])


def make_worker(oracle: OracleTensors, span: int = 1, drafts: int = 3, **limits: Any) -> OracleWorker:
    options = {"max_batch": 4, "token_budget": 32, "chunk": 6, "max_queue": 100, "max_len": 500, **limits}
    shape = DraftShape(oracle.cache.coupling, span, drafts)
    return OracleWorker(oracle, AdmissionLimits(**options), shape, random.Random(3))


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_trap_10_failed_growth_in_decode_leaves_both_capacities(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair()
    request = start(oracle, range(8))
    request.finish_prefill()
    before = capacities(request), in_use(oracle.cache)
    refuse(oracle.cache, pool, monkeypatch)
    assert oracle.cache.reserve(request.handle, 4, 6) is None
    assert (capacities(request), in_use(oracle.cache)) == before
    monkeypatch.undo()
    assert request.verify([1, 2, 3], [1, 2, 3, 4], scratch=2)


@pytest.mark.parametrize("pool", ["target", "draft"])
def test_trap_11_a_failed_chunk_leaves_the_request_as_it_was(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair()
    serve(oracle, range(9))
    request = start(oracle, range(40))
    first = request.handle.cursor("target"), capacities(request)
    assert first[0] == 8
    refuse(oracle.cache, pool, monkeypatch)
    assert not request.prefill(10)
    assert (request.handle.cursor("target"), capacities(request)) == first
    monkeypatch.undo()
    assert request.prefill(10)
    later = request.handle.cursor("target"), capacities(request)
    refuse(oracle.cache, pool, monkeypatch)
    assert not request.prefill(10)
    assert (request.handle.cursor("target"), capacities(request)) == later
    # Where the request must be dropped, it goes back to its beginning, in both pools.
    oracle.cache.suspend(request.handle)
    assert [request.handle.cursor(name) for name in request.handle.pools] == [0, 0]
    assert capacities(request) == [0, 0]


def test_trap_12_a_third_pool_that_fails_gives_both_growths_back(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair(extra=[PoolSpec("cross", 2, 30, span=0)])
    request = start(oracle, range(10))
    before = capacities(request), available(oracle.cache)
    refuse(oracle.cache, "cross", monkeypatch)
    assert oracle.cache.reserve(request.handle, 10, 10, (10,)) is None
    assert (capacities(request), available(oracle.cache)) == before
    monkeypatch.undo()
    request.finish_prefill()
    assert request.handle.cursor("cross") == 10


def test_trap_13_a_hundred_planned_but_skipped_steps_change_nothing() -> None:
    oracle = make_pair(blocks=12)
    worker = make_worker(oracle)
    for name in "abc":
        worker.admission.submit(make_request(name, [ord(name)] * 9, 12))
    for _ in range(4):
        worker.step()
    before = in_use(oracle.cache), available(oracle.cache)
    for _ in range(100):
        worker.admission.revert(worker.admission.plan(0.0))
    assert (in_use(oracle.cache), available(oracle.cache)) == before
    worker.drain(200)


def test_trap_14_reverting_twice_gives_back_once() -> None:
    oracle = make_pair()
    request = start(oracle, range(8))
    reservation = oracle.cache.reserve(request.handle, 8, 8)
    assert reservation is not None
    oracle.cache.revert(reservation)
    assert available(oracle.cache) == [64, 64]
    assert oracle.cache.reserve(request.handle, 8, 8) is not None
    oracle.cache.revert(reservation)  # not the one that is open now
    assert capacities(request) == [8, 8]
    oracle.cache.check()
    oracle.cache.commit(request.handle, 8, 7)
    oracle.cache.revert(reservation)
    assert capacities(request) == [8, 8]
    assert in_use(oracle.cache) == [(2, 0), (2, 0)]


def test_trap_15_any_widths_and_any_number_of_accepted_tokens() -> None:
    oracle = make_pair(span=1, block_size=3, blocks=900, draft_block_size=5, draft_blocks=600)
    request = start(oracle, range(4))
    request.finish_prefill()
    rng = random.Random(15)
    for _ in range(1000):
        drafts = rng.randrange(6)
        assert request.decode(drafts, rng.randint(0, drafts), scratch=rng.randrange(9))
        for holding in request.handle.holdings.values():
            assert len(holding.table) == holding.pool.spec.blocks_for(holding.cursor)
    oracle.cache.check()
    oracle.check_handle(request.handle)
    oracle.check_published()


def test_trap_16_giving_back_never_cuts_into_committed_history() -> None:
    oracle = make_pair()
    request = start(oracle, range(10))
    request.finish_prefill()
    for holding in request.handle.holdings.values():
        holding.shrink(1000)
    assert capacities(request) == [12, 12]
    oracle.check_handle(request.handle)


def test_trap_17_suspend_resume_and_free_hit_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair()
    worker = make_worker(oracle)
    request = make_request("a", range(20), 10)
    worker.admission.submit(request)
    worker.step()
    assert all(used for used, _ in in_use(oracle.cache))
    worker.admission.revert(worker.admission.plan(0.0))
    handle = request.handle
    assert handle is not None
    worker.admission._back_to_queue(request)
    assert in_use(oracle.cache) == [(0, 0), (0, 0)]
    refuse(oracle.cache, "draft", monkeypatch)  # the draft can't be resumed, so the target isn't either
    assert not worker.admission.plan(0.0).rows
    assert in_use(oracle.cache) == [(0, 0), (0, 0)]
    assert (handle.status, request.status) == (HandleStatus.IDLE, RequestStatus.WAITING)
    monkeypatch.undo()
    worker.drain(60)
    assert request.output == reference(range(20), 10)
    assert in_use(oracle.cache) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("evict", [1, 2, 100])
@pytest.mark.parametrize("when", ["prepare", "take"])
def test_trap_18_evictions_during_a_claim(evict: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair()
    serve(oracle, range(34))
    calls: list[str] = []
    original = getattr(Holding, when)

    def evicting(holding: Holding, depth: int) -> Any:
        for pool in oracle.cache.pools.values():
            pool.tree.evict(evict)
        calls.append(holding.pool.spec.name)
        return original(holding, depth)

    monkeypatch.setattr(Holding, when, evicting)
    request = start(oracle, range(34))
    monkeypatch.undo()
    oracle.cache.check()
    assert calls.count("draft") <= 3, "claimed more than twice again"
    assert request.handle.cursor("target") == request.handle.cursor("draft")
    request.finish_prefill()
    oracle.check_handle(request.handle)


@pytest.mark.parametrize("seed", range(12))
def test_trap_19_in_tiny_pools_every_request_ends_or_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    span = rng.randrange(3)
    oracle = make_pair(
        span,
        rng.randint(1, 4),
        rng.randint(3, 9),
        rng.choice([Coupling.JOINT, Coupling.INDEPENDENT]),
        draft_blocks=rng.randint(3, 9),
    )
    worker = make_worker(oracle, span, token_budget=8)
    accepted, refused = [], 0
    for number in range(30):
        request = make_request(str(number), [rng.randrange(3) for _ in range(rng.randint(1, 20))], rng.randint(1, 9))
        try:
            worker.admission.submit(request)
        except PromptTooLarge as refusal:
            refused += 1
            assert str(refusal.needed_blocks) in str(refusal) and str(refusal.largest_prompt) in str(refusal)
        else:
            accepted.append(request)
    worker.drain(2000)
    assert len(accepted) + refused == 30 and accepted
    for request in accepted:
        assert request.finish is FinishReason.LENGTH
        assert request.output == reference(request.prompt, request.sampling.max_tokens)


def test_trap_21_failed_admissions_leak_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = make_pair(blocks=16)
    serve(oracle, range(30))
    worker = make_worker(oracle)
    request = make_request("a", [*range(14), *[50] * 20], 5)
    worker.admission.submit(request)
    before = available(oracle.cache)
    reserve = oracle.cache.reserve
    monkeypatch.setattr(oracle.cache, "reserve", lambda *_: None)
    for _ in range(20):
        assert not worker.admission.plan(0.0).rows
        assert available(oracle.cache) == before
        assert (request.first_frontier, request.preemptions, request.status) == (None, 0, RequestStatus.WAITING)
    monkeypatch.setattr(oracle.cache, "reserve", reserve)
    worker.drain(40)
    assert request.output == reference(request.prompt, 5)


def test_trap_22_dummies_need_room_in_both_pools_but_are_never_published() -> None:
    oracle = make_pair(blocks=4)
    dummy = start(oracle, range(10), reuse=False)
    dummy.finish_prefill()
    assert [meters.in_use for meters in oracle.cache.meters().values()] == [3, 3]
    assert oracle.cache.reserve(dummy.handle, 8, 8) is None
    dummy.say([1, 2])
    dummy.end()
    changes = oracle.cache.changes()
    assert not changes.stored and not changes.removed and not oracle.cache.snapshot().stored
    assert available(oracle.cache) == [4, 4]
    assert all(meters.cached == 0 for meters in oracle.cache.meters().values())
    assert start(oracle, range(10)).handle.cursor("target") == 0


def test_trap_24_block_tables_are_valid_after_suspend_resume_and_migration() -> None:
    oracle, elsewhere = make_pair(blocks=16), make_pair(blocks=16)
    request = start(oracle, range(9))
    request.finish_prefill()
    request.say([1, 2, 3])
    oracle.cache.suspend(request.handle)
    serve(oracle, [70] * 30)  # others take some of the blocks meanwhile
    request.claim()
    oracle.check_handle(request.handle)
    request.finish_prefill()
    request.say([4])
    moved = start(elsewhere, request.tokens)
    moved.finish_prefill()
    moved.say([5])
    for each, tensors in ((request, oracle), (moved, elsewhere)):
        tensors.cache.check()
        tensors.check_handle(each.handle)
        for holding in each.handle.holdings.values():
            assert len(set(holding.table)) == len(holding.table) == holding.pool.spec.blocks_for(holding.cursor)


@pytest.mark.parametrize("window", [2, 4, 7])
@pytest.mark.parametrize("evicted", [0, 3, 8])
def test_trap_26_the_pages_that_a_window_needs_are_there_at_any_claimed_depth(window: int, evicted: int) -> None:
    draft = PoolSpec("draft", 3, 64, 1, window=window)
    oracle = OracleTensors(PairedCache(PoolSpec("target", 4, 64), draft, Coupling.JOINT))
    serve(oracle, range(8), range(8, 30))
    oracle.cache.pools["draft"].tree.evict(evicted)
    claimed = set()
    for length in range(2, 30):
        request = start(oracle, [*range(length), 99])
        depth = request.handle.cursor("draft")
        for position in range(max(0, depth - window + 1), depth):
            assert oracle.read(request.handle, "draft", position) == tuple(range(position + 2))
        claimed.add(depth)
        request.cache.free(request.handle, publish_tail=False)
    assert len(claimed) > 1


def test_trap_28_reserved_blocks_are_metered_apart_and_evict_no_more_than_needed() -> None:
    oracle = make_pair(blocks=8)
    serve(oracle, range(12))
    request = start(oracle, [80] * 4)
    request.finish_prefill()
    reservation = oracle.cache.reserve(request.handle, 2, 7)
    assert oracle.cache.meters() == {
        "target": PoolMeters(total=8, free=3, cached=3, in_use=2, reserved=1),
        "draft": PoolMeters(total=8, free=2, cached=3, in_use=3, reserved=2),
    }
    assert reservation is not None
    oracle.cache.revert(reservation)
    assert [meters.reserved for meters in oracle.cache.meters().values()] == [0, 0]
    assert oracle.cache.reserve(request.handle, 100, 100) is None
    assert [meters.cached for meters in oracle.cache.meters().values()] == [3, 3], "a refusal must evict nothing"


@pytest.mark.parametrize("budget", [10_000, 123_457, 10**9])
def test_trap_29_both_pools_together_stay_within_the_one_byte_budget(budget: int) -> None:
    widths, sizes = (48, 12), (16, 32)
    target, draft = split_budget(budget, widths, sizes)
    bytes_used = (target + 1) * sizes[0] * widths[0] + (draft + 1) * sizes[1] * widths[1]
    assert bytes_used <= budget
    assert abs(target * sizes[0] - draft * sizes[1]) < max(sizes), "both hold about as many positions"
    with pytest.raises(ValueError, match="at least"):
        split_budget(1000, widths, sizes)
