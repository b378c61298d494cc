"""The few workers worth pricing in full, out of hundreds.

Each is ranked by a rough cost, made of what is at hand: when it will be free, its standing load, and the prefill that
its pools save. Pricing every worker exactly would cost a fleet of 256 most of a millisecond for each request. Pure;
called by `cluster.routing.router`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from cluster.core.handle import Coupling
from cluster.routing.prefix_map import Depth
from cluster.routing.types import DispatchQuery
from cluster.routing.worker_state import WorkerState

SHORTLIST = 8


def shortlist(
    query: DispatchQuery,
    workers: Sequence[WorkerState],
    depths: Mapping[str, Depth],
    per_token_ms: float,
    now: float,
    rng: random.Random,
) -> list[WorkerState]:
    """At most `SHORTLIST` of the workers that have a place left, those with the lowest rough cost; equal ones in random
    order. `per_token_ms` is what a token of the prompt costs that isn't reused."""
    free = [worker for worker in workers if worker.in_flight < worker.capacity]
    if len(free) <= SHORTLIST:
        return free
    turn = rng.randrange(len(free))
    free = free[turn:] + free[:turn]
    per_block = query.block_size * per_token_ms
    speculates, held, rough = query.speculate, depths.get, []
    for worker in free:
        wait = 1000.0 * (worker.busy_until - now)
        cost = worker.decode_ms + (wait if wait > worker.queue_ms else worker.queue_ms)
        depth = held(worker.worker_id)
        if depth is not None:
            target, draft = depth
            clipped = draft < target and speculates and worker.info.coupling is Coupling.JOINT
            cost -= per_block * (draft if clipped else target)
        rough.append(cost)
    return [free[place] for place in sorted(range(len(free)), key=rough.__getitem__)[:SHORTLIST]]


def mean_backlog_ms(workers: Sequence[WorkerState], now: float) -> float:
    """Prefill that waits on the workers, on average."""
    busy = [worker.busy_until for worker in workers if worker.busy_until > now]
    return 1000.0 * (sum(busy) - len(busy) * now) / len(workers)
