"""The workloads of `tandem bench router`: a router that knows 256 workers, prompts that they hold, reports to absorb.

Nothing is random from run to run. Called by `router.py`, and by `actors.router_load` for the same decisions through
Ray.
"""

from __future__ import annotations

import gc
import random
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cluster.core.frontier import BlockState, FrontierReport
from cluster.core.handle import Coupling
from cluster.routing.packed_keys import PackedKeys
from cluster.routing.policy import CostModel
from cluster.routing.prefix_map import PrefixMap
from cluster.routing.router import Router, RouterLimits
from cluster.routing.types import DispatchQuery, ModelCard, Placement, WorkerInfo, WorkerLoad

BLOCKS = 4096
"""Of the prompt that is placed."""
BLOCK_SIZE = 16
WORKERS = 256
TYPICAL_HOLDERS = 8
REPORT_BLOCKS = 64
_DRAFT_BEHIND = 2
"""Blocks by which a holder's draft depth is less than its target depth."""
_HEARTBEAT_EVERY = 50


class Decisions(NamedTuple):
    times: list[float]
    """Seconds of each decision, on the wall clock."""
    cpu_s: float
    """Seconds that this thread computed for all of them."""

    def quantile(self, share: float) -> float:
        return sorted(self.times)[min(len(self.times) - 1, int(share * len(self.times)))]

    @property
    def rate(self) -> float:
        """Decisions a second of this thread's time, one after the other."""
        return len(self.times) / self.cpu_s


def make_keys(seed: int, blocks: int = BLOCKS) -> tuple[bytes, ...]:
    rng = random.Random(seed)
    return tuple(rng.randbytes(32) for _ in range(blocks))


def make_worker(number: int) -> WorkerInfo:
    card = ModelCard("model", "fingerprint", "float32", BLOCK_SIZE, max_len=1 << 20, vocab_size=50_000)
    return WorkerInfo(f"worker-{number}", 1, "127.0.0.1:1", card, Coupling.JOINT, max_running=64, max_queue=64)


def make_query(number: int, packed: PackedKeys) -> DispatchQuery:
    """As it comes from a gateway, which packs the keys."""
    return DispatchQuery(f"request-{number}", "model", packed, len(packed) * BLOCK_SIZE + 5, 64, BLOCK_SIZE)


def holdings(keys: Sequence[bytes], holders: int) -> Iterator[FrontierReport]:
    """Reports by which so many workers hold the prompt, each to a depth of its own, and a little less in the draft."""
    for holder in range(holders):
        depth = (holder + 1) * len(keys) // holders
        states = chain_states(keys[:depth], depth - _DRAFT_BEHIND)
        yield FrontierReport(f"worker-{holder * WORKERS // holders}", 1, 1, states)


def chain_states(keys: Sequence[bytes], draft: int) -> tuple[BlockState, ...]:
    return tuple(
        BlockState(key, keys[depth - 1] if depth else None, depth, target=True, draft=depth < draft)
        for depth, key in enumerate(keys)
    )


def make_router(max_blocks: int = 2_000_000) -> Router:
    router = Router(RouterLimits(lease_s=1e9, max_blocks=max_blocks), CostModel(), random.Random(0))
    for number in range(WORKERS):
        router.register(make_worker(number), 0, 0.0)
        router.heartbeat(f"worker-{number}", 1, WorkerLoad(), 0.0)
    return router


def decide(holders: int, rounds: int) -> Decisions:
    """Whole decisions on one prompt: depths, costs, choice, reservation. Heartbeats in between confirm what was placed,
    outside of the measured time."""
    router, keys = make_router(), make_keys(1)
    for report in holdings(keys, holders):
        router.apply(report)
    packed = PackedKeys.of(keys)
    times, cpu_s, placed = [], 0.0, dict[str, list[str]]()
    for number in range(rounds):
        query = make_query(number, packed)
        started, cpu_started = time.perf_counter(), time.thread_time()
        answer = router.dispatch(query, 0.001 * number)
        cpu_s += time.thread_time() - cpu_started
        times.append(time.perf_counter() - started)
        if not isinstance(answer, Placement):
            raise RuntimeError(f"no worker took request {number} of this measurement")
        placed.setdefault(answer.worker_id, []).append(query.request_id)
        if number % _HEARTBEAT_EVERY == 0:
            for worker_id, names in placed.items():
                router.heartbeat(worker_id, 1, WorkerLoad(started=tuple(names)), 0.001 * number)
            placed.clear()
    return Decisions(times, cpu_s)


def absorb(reports: int) -> float:
    """Blocks that a second of this thread's time brings into the map, in reports of new chains of 64 blocks."""
    router = make_router()
    made = []
    for number in range(reports):
        states = chain_states(make_keys(number, REPORT_BLOCKS), REPORT_BLOCKS - _DRAFT_BEHIND)
        made.append(FrontierReport(f"worker-{number % WORKERS}", 1, number // WORKERS + 1, states))
    gc.collect()
    started = time.thread_time()
    for report in made:
        router.apply(report)
    return reports * REPORT_BLOCKS / (time.thread_time() - started)


class Memory(NamedTuple):
    bytes_per_block: float
    growth: float
    """Memory after three times as many blocks came as the map can hold, over memory when it was first full."""


def memory(blocks: int) -> Memory:
    """Of a map that holds about so many unique blocks, in chains of 64, each held by one to four of the workers."""
    rng = random.Random(3)
    prefixes = PrefixMap(blocks * 10 // 9)
    for number in range(WORKERS):
        prefixes.reset(f"worker-{number}")
    gc.collect()
    tracemalloc.start()
    try:
        _fill(prefixes, rng, blocks)
        per_block = tracemalloc.get_traced_memory()[0] / len(prefixes)
        _fill(prefixes, rng, blocks)
        full = tracemalloc.get_traced_memory()[0]
        _fill(prefixes, rng, 3 * blocks)
        return Memory(per_block, tracemalloc.get_traced_memory()[0] / full)
    finally:
        tracemalloc.stop()


def _fill(prefixes: PrefixMap, rng: random.Random, blocks: int) -> None:
    for _ in range(blocks // REPORT_BLOCKS):
        states = chain_states([rng.randbytes(32) for _ in range(REPORT_BLOCKS)], REPORT_BLOCKS - _DRAFT_BEHIND)
        for holder in rng.sample(range(WORKERS), rng.choice((1, 1, 1, 2, 2, 4))):
            prefixes.store(f"worker-{holder}", states)
