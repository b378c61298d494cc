"""Decisions through the scheduler's actor: what `tandem bench router` measures of it.

Starts a private Ray, an embedded Redis and one scheduler, tells it of 256 workers that don't exist, and asks it from
this process as gateways do. Invariant: all of it is gone at the end.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ray.actor import ActorHandle

from actors.handles import SCHEDULER, SchedulerClient
from actors.runtime import NAMESPACE, RayRuntime
from actors.scheduler import SchedulerActor, SchedulerOptions
from cluster.bench.router_workloads import (
    TYPICAL_HOLDERS,
    WORKERS,
    Decisions,
    holdings,
    make_keys,
    make_query,
    make_worker,
)
from cluster.directory.embedded import EmbeddedRedis
from cluster.routing.packed_keys import PackedKeys
from cluster.routing.router import RouterLimits

_AT_ONCE = 4
"""Requests that wait for their placement at the same time."""


def run_actor_bench(rounds: int) -> dict[str, float]:
    """Decisions a second with four asked for at once, and how long each took. Takes half a minute to start."""
    runtime = RayRuntime()
    try:
        with EmbeddedRedis() as redis:
            runtime.start(log_to_driver=False)
            options = SchedulerOptions(redis.url, limits=RouterLimits(lease_s=600.0), log_level="error")
            actor: Any = SchedulerActor
            scheduler = actor.options(name=SCHEDULER, namespace=NAMESPACE, num_cpus=0).remote(options)
            return asyncio.run(_measure(scheduler, rounds))
    finally:
        runtime.stop()


async def _measure(scheduler: ActorHandle[Any], rounds: int) -> dict[str, float]:
    await scheduler.load.remote()
    client = SchedulerClient()
    for number in range(WORKERS):
        await client.register(make_worker(number), 0)
    keys = make_keys(1)
    for report in holdings(keys, TYPICAL_HOLDERS):
        await client.report(report)
    packed = PackedKeys.of(keys)
    await _ask(client, packed, 200)
    started = time.perf_counter()
    decisions = await _ask(client, packed, rounds)
    return {
        "router.actor_decisions_per_s": rounds / (time.perf_counter() - started),
        "router.actor_p50_ms": 1e3 * decisions.quantile(0.5),
        "router.actor_p99_ms": 1e3 * decisions.quantile(0.99),
    }


async def _ask(client: SchedulerClient, packed: PackedKeys, rounds: int) -> Decisions:
    times, cpu_started = list[float](), time.thread_time()
    queries = iter([make_query(number, packed) for number in range(rounds)])

    async def ask() -> None:
        for query in queries:
            started = time.perf_counter()
            await client.dispatch(query)
            times.append(time.perf_counter() - started)

    await asyncio.gather(*(ask() for _ in range(_AT_ONCE)))
    return Decisions(times, time.thread_time() - cpu_started)
