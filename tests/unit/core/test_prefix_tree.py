"""The tree of one pool: closest matches, growth in place, duplicates, and in which order blocks are given up."""

import random
from collections.abc import Sequence

import pytest

from cluster.core.block_pool import BlockPool, PoolSpec
from cluster.core.eviction import DecayingPriority, LeastRecentlyUsed
from cluster.core.holding import Holding
from cluster.core.keys import KeyStream, ReuseScope
from cluster.core.runs import Run

SCOPE = ReuseScope("m", "target", 0, "float32", 4)


def make_pool(blocks: int = 64, policy: object = None) -> BlockPool:
    return BlockPool(PoolSpec("target", 4, blocks), policy=policy)  # type: ignore[arg-type]


def hold(pool: BlockPool, tokens: Sequence[int], weight: float = 1.0) -> Holding:
    """Claims and computes all of `tokens`."""
    holding = Holding(pool, KeyStream(SCOPE, tokens), None, reuse=True, weight=weight)
    depth = holding.depth(10**6)
    holding.prepare(depth)
    holding.take(depth)
    assert holding.grow(holding.missing(len(tokens) - holding.cursor))
    holding.advance(len(tokens) - holding.cursor)
    return holding


def publish(pool: BlockPool, tokens: Sequence[int], weight: float = 1.0) -> None:
    holding = hold(pool, tokens, weight)
    holding.publish_tail()
    holding.release()


def depth(pool: BlockPool, tokens: Sequence[int]) -> int:
    return pool.tree.match(KeyStream(SCOPE, tokens)).depth(4)


def runs(pool: BlockPool) -> list[Run]:
    return [run for run in pool.tree.runs() if run.blocks]


def test_the_closest_of_many_siblings_is_found() -> None:
    pool = make_pool(2000)
    rng = random.Random(4)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 12))] for _ in range(400)]
    for text in texts:
        publish(pool, text)
    for _ in range(400):
        asked = [rng.randrange(3) for _ in range(12)]
        shared = [next((i for i, (a, b) in enumerate(zip(asked, t, strict=False)) if a != b), len(t)) for t in texts]
        assert depth(pool, asked) == max(shared)


def test_a_long_prompt_is_one_run_and_grows_in_place() -> None:
    pool = make_pool(600)
    holding = hold(pool, range(1600))
    for token in range(80):
        holding.stream.extend([token])
        assert holding.grow(holding.missing(1))
        holding.advance(1)
    assert len(runs(pool)) == 1
    assert len(runs(pool)[0].blocks) == 420


def test_two_that_compute_the_same_end_up_with_the_same_blocks() -> None:
    pool = make_pool()
    first, second = hold(pool, range(8)), hold(pool, [9] * 3)
    second.release()
    second.stream = KeyStream(SCOPE, range(8))
    assert second.grow(2)
    assert pool.meters().in_use == 4
    second.advance(8)
    assert second.table == first.table
    assert pool.meters().in_use == 2


def test_a_tail_gives_way_to_the_full_block_that_covers_it() -> None:
    pool = make_pool()
    publish(pool, range(6))
    assert pool.meters().cached == 2
    publish(pool, range(8))
    assert (pool.meters().cached, len(runs(pool))) == (2, 1)
    publish(pool, range(7))  # covered already
    assert pool.meters().cached == 2


def test_the_least_recently_used_block_goes_first_and_the_end_before_the_beginning() -> None:
    pool = make_pool(12)
    for base in (100, 200, 300):
        publish(pool, range(base, base + 16))
    publish(pool, range(100, 116))
    pool.tree.evict(3)
    assert [depth(pool, range(base, base + 16)) for base in (100, 200, 300)] == [16, 4, 16]
    pool.tree.evict(2)
    assert [depth(pool, range(base, base + 16)) for base in (100, 200, 300)] == [16, 0, 12]


def test_what_is_in_use_is_never_evicted_and_its_ancestors_neither() -> None:
    pool = make_pool(8)
    publish(pool, range(16))
    reader = hold(pool, range(8))
    pool.tree.evict(100)
    assert depth(pool, range(16)) == 8
    assert pool.allocate(7) is None
    reader.release()
    assert pool.allocate(8) is not None


def test_a_request_for_too_many_blocks_evicts_nothing() -> None:
    pool = make_pool(8)
    publish(pool, range(16))
    assert pool.allocate(9) is None
    assert depth(pool, range(16)) == 16


def test_a_shared_beginning_outlives_its_branches() -> None:
    pool = make_pool(6)
    publish(pool, [*range(8), *[50] * 8])
    publish(pool, [*range(8), *[60] * 8])
    for left in (5, 4, 3, 2):
        pool.tree.evict(1)
        assert pool.meters().cached == left
        assert depth(pool, range(8)) == 8
    pool.tree.evict(2)
    assert not pool.tree.roots


def test_weight_keeps_a_prefix_for_some_half_lives_and_no_longer() -> None:
    pool = make_pool(100, DecayingPriority(half_life=4))
    publish(pool, range(100, 104), weight=4.0)
    for base in range(6):
        publish(pool, range(base * 10, base * 10 + 4))
    pool.tree.evict(1)
    assert (depth(pool, range(100, 104)), depth(pool, range(4))) == (4, 0)
    for base in range(20, 26):
        publish(pool, range(base * 10, base * 10 + 4))
    pool.tree.evict(7)
    assert (depth(pool, range(100, 104)), depth(pool, range(210, 214))) == (0, 4)


def test_an_important_branch_keeps_the_beginning_that_it_needs() -> None:
    pool = make_pool(100, DecayingPriority(half_life=100))
    publish(pool, [*range(4), *[50] * 4], weight=8.0)
    publish(pool, range(4), weight=0.1)
    publish(pool, [60] * 4)
    pool.tree.evict(1)
    assert depth(pool, [*range(4), *[50] * 4]) == 8
    assert depth(pool, [60] * 4) == 0


def test_equal_weights_make_decaying_priority_least_recently_used() -> None:
    rng = random.Random(7)
    pools = [make_pool(30, policy) for policy in (LeastRecentlyUsed(), DecayingPriority())]
    for _ in range(300):
        text = [rng.randrange(2) for _ in range(rng.randint(1, 20))]
        for pool in pools:
            publish(pool, text)
        assert depth(pools[0], text) == depth(pools[1], text)
    kept = [sorted((bytes(run.units), run.start) for run in pool.tree.runs()) for pool in pools]
    assert kept[0] == kept[1]


def test_bad_numbers_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="half_life is 0"):
        DecayingPriority(half_life=0)
    with pytest.raises(ValueError, match="block_size of pool 'target' is 0"):
        PoolSpec("target", 0, 4)
