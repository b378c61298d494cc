"""The sizes-only pools against the real paired cache: same reuse, same evictions."""

import random
from dataclasses import dataclass

import pytest

from cluster.bench.route.pools import SimPool
from cluster.core.handle import CacheHandle, Coupling
from cluster.core.paired_cache import PairedCache, PoolSpec

CAPACITY = 40


@dataclass
class Both:
    """One request in both models. A real block is one token here, so a prompt's tokens are its blocks."""

    chain: tuple[int, ...]
    handle: CacheHandle
    pools: tuple[SimPool, ...]
    depths: tuple[int, ...]


class Pair:
    def __init__(self) -> None:
        self.real = PairedCache(
            PoolSpec("target", 1, CAPACITY), PoolSpec("draft", 1, CAPACITY), Coupling.INDEPENDENT, reports=False
        )
        self.changed: set[int] = set()
        self.target, self.draft = SimPool(CAPACITY, self.changed), SimPool(CAPACITY, self.changed)

    def start(self, chain: tuple[int, ...], speculative: bool) -> Both | None:
        """Claims, and reserves the whole prompt. None if it doesn't fit; both must agree in that and in what is
        reused."""
        handle = self.real.open("request", [*chain, 0], use_draft=speculative)
        frontier = self.real.claim(handle).frontier
        pools = (self.target, self.draft) if speculative else (self.target,)
        depths = tuple(pool.depth(chain) for pool in pools)
        assert depths == ((frontier.target, frontier.draft) if speculative else (frontier.target,))
        for pool, depth in zip(pools, depths, strict=True):
            pool.hold(chain[:depth])
        both = Both(chain, handle, pools, depths)
        missing = [len(chain) - depth for depth in depths]
        fits = self.real.reserve(handle, *missing) is not None
        assert fits == all(need <= CAPACITY - pool.in_use for need, pool in zip(missing, pools, strict=True))
        if not fits:
            self.release(both)
            return None
        assert all(pool.take(need) for pool, need in zip(pools, missing, strict=True))
        return both

    def finish(self, both: Both) -> None:
        missing = [len(both.chain) - depth for depth in both.depths]
        self.real.commit(both.handle, *missing)
        for pool, depth in zip(both.pools, both.depths, strict=True):
            pool.publish(both.chain[depth:])
        both.depths = (len(both.chain),) * len(both.pools)
        self.release(both)

    def release(self, both: Both) -> None:
        self.real.free(both.handle)
        for pool, depth in zip(both.pools, both.depths, strict=True):
            pool.let_go(both.chain[:depth])

    def check(self) -> None:
        for name, pool in (("target", self.target), ("draft", self.draft)):
            meters = self.real.meters()[name]
            assert (pool.free, pool.in_use) == (meters.free, meters.in_use), name


def chains(rng: random.Random) -> list[tuple[int, ...]]:
    """Prompts that fork from a few beginnings; a number stands for a block and all before it."""
    numbers, made = iter(range(1, 10_000)), []
    for _ in range(4):
        root = tuple(next(numbers) for _ in range(rng.randint(1, 6)))
        for _ in range(5):
            branch = (*root, *(next(numbers) for _ in range(rng.randint(0, 6))))
            made += [branch, (*branch, *(next(numbers) for _ in range(rng.randint(1, 6))))]
    return made


@pytest.mark.parametrize("seed", range(20))
def test_reuse_and_eviction_are_those_of_the_real_caches(seed: int) -> None:
    rng, pair, open_requests = random.Random(seed), Pair(), list[Both]()
    prompts = chains(rng)
    refused = 0
    for _ in range(300):
        if open_requests and rng.random() < 0.5:
            pair.finish(open_requests.pop(rng.randrange(len(open_requests))))
        else:
            both = pair.start(rng.choice(prompts), speculative=rng.random() < 0.7)
            open_requests += [both] if both else []
            refused += both is None
        pair.check()
    assert pair.target.evicted > 50 and pair.draft.evicted > 50, "the pools were under pressure"
    assert refused, "and sometimes full"


def test_what_was_published_or_evicted_is_told() -> None:
    changed: set[int] = set()
    pool = SimPool(3, changed)
    assert pool.take(2)
    pool.publish((1, 2))
    assert changed == {1, 2}
    pool.let_go((1, 2))
    changed.clear()
    assert pool.take(2)
    assert changed == {2}, "the deepest block goes first"
    assert 1 in pool and 2 not in pool
