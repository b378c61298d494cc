"""The policies by name, in the order in which they are reported."""

from __future__ import annotations

import random
from collections.abc import Callable

from cluster.bench.route.approximate import CacheAware, PrefixAffinity
from cluster.bench.route.balancing import ConsistentHash, LeastLoaded, PowerOfTwo, RoundRobin
from cluster.bench.route.informed import DynamoCost, LlmdScorer
from cluster.bench.route.policy import Policy
from cluster.bench.route.product import TandemRouter
from cluster.bench.route.timing import WorkerSpec

Maker = Callable[[int, random.Random, WorkerSpec, int], Policy]
"""(workers, source of its random choices, kind of worker, tokens of a block) -> policy"""

OURS = "tandem"
DRAFT_BLIND = "target_only"
"""Tandem's router without its knowledge of draft pools."""

POLICIES: dict[str, Maker] = {
    "round_robin": lambda workers, rng, spec, block: RoundRobin(workers, rng),
    "least_loaded": lambda workers, rng, spec, block: LeastLoaded(workers, rng),
    "power_of_two": lambda workers, rng, spec, block: PowerOfTwo(workers, rng),
    "consistent_hash": lambda workers, rng, spec, block: ConsistentHash(workers, rng),
    "cache_aware": lambda workers, rng, spec, block: CacheAware(workers, rng),
    "prefix_affinity": lambda workers, rng, spec, block: PrefixAffinity(workers, rng),
    "dynamo": lambda workers, rng, spec, block: DynamoCost(workers, rng, block),
    "llm_d": lambda workers, rng, spec, block: LlmdScorer(workers, rng),
    DRAFT_BLIND: lambda workers, rng, spec, block: TandemRouter(workers, rng, spec, block, draft_aware=False),
    OURS: lambda workers, rng, spec, block: TandemRouter(workers, rng, spec, block),
}
