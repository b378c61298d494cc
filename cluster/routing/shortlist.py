"""The few workers worth pricing in full, out of hundreds.

Each is ranked by a rough cost, made of what is at hand: when it will be free, its standing load, and the prefill that
its pools save. Pricing every worker exactly would cost a fleet of 256 most of a millisecond for each request. Pure;
called by `cluster.routing.router`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from heapq import nsmallest

from cluster.core.handle import Coupling
from cluster.routing.policy import CostModel
from cluster.routing.prefix_map import Depth
from cluster.routing.types import DispatchQuery
from cluster.routing.worker_state import WorkerState

SHORTLIST = 12


def shortlist(
    query: DispatchQuery,
    workers: Sequence[WorkerState],
    depths: Mapping[str, Depth],
    costs: CostModel,
    now: float,
    rng: random.Random,
) -> Sequence[WorkerState]:
    """At most `SHORTLIST` of the workers, those with the lowest rough cost; at random where equal."""
    if len(workers) <= SHORTLIST:
        return workers
    draw = rng.random
    ranked = [
        (worker.decode_ms + max(worker.queue_ms, 1000.0 * (worker.busy_until - now)), draw(), place)
        for place, worker in enumerate(workers)
    ]
    if depths:
        per_block = query.block_size * costs.target_token_ms
        for place, worker in enumerate(workers):
            depth = depths.get(worker.worker_id)
            if depth is not None:
                clipped = query.speculate and worker.info.coupling is Coupling.JOINT
                rough, drawn, _ = ranked[place]
                ranked[place] = rough - per_block * (min(depth) if clipped else depth.target), drawn, place
    return [workers[place] for _, _, place in nsmallest(SHORTLIST, ranked)]
