"""What placing a request on a worker would cost, in predicted milliseconds, and which candidate is cheapest.

    prefill   what the target pool lacks, and what the draft pool lacks
    backlog   prefill that the worker has to finish first
    decode    steps shared with the requests that run there
    queue     the wait for a place in the batch, or for blocks that running requests hold, beyond that of the backlog
    eviction  cached KV that the request would push out, which somebody may ask for again

A hidden-state draft reuses only to the joint frontier, so both pools are priced from there; an independent draft
catches up alone, so each pool is priced from its own depth. Load is priced for each candidate by itself, in the same
unit as reuse: a busy holder's prefix loses its worth bit by bit, and only there.

Pure and stateless: `cluster.routing.router` gathers the candidates and reserves the winner; a simulator can do the
same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.core.frontier import Frontier
from cluster.core.handle import Coupling
from cluster.routing.prefix_map import Depth
from cluster.routing.types import DispatchQuery, WorkerInfo


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds per unit of work on one kind of worker. The defaults fit a small model on two CPU cores; only their
    ratios matter for the choice."""

    target_token_ms: float = 1.0
    target_context_ms: float = 0.0
    """What attention adds for each token that stands before the one computed."""
    draft_token_ms: float = 0.1
    decode_request_ms: float = 10.0
    """Slower decoding that each request already running there means for the new one."""
    queued_request_ms: float = 2000.0
    """Wait for each request that stands before the new one once the batch or the pool is full."""
    crowding_weight: float = 2.0
    """How much dearer prefill is in a crowded fleet, for each whole prompt's prefill that waits on the average worker
    beyond `crowding_slack` of one."""
    crowding_slack: float = 0.4
    eviction_weight: float = 0.0
    """How much of a cached token's prefill its eviction costs: the odds that it would have been reused."""

    def target_ms(self, start: int, tokens: int) -> float:
        """Prefill in the target of so many tokens behind the first `start`."""
        return tokens * (self.target_token_ms + self.target_context_ms * (start + tokens / 2))


class Candidate(NamedTuple):
    """A worker that may take the request, with what it holds of the prompt and what it has to do already."""

    info: WorkerInfo
    depth: Depth
    in_flight: int = 0
    backlog_ms: float = 0.0
    """Prefill that is under way or waits there."""
    free_tokens: float = float("inf")
    """Positions of the target pool that nothing is cached in, less what waiting requests will take."""
    room_tokens: float = float("inf")
    """The same, with what can be evicted."""
    request_tokens: float = 0.0
    """Positions that a running request holds on average."""
    acceptance: float = 1.0
    """Tokens that a decode step yields there."""


class Cost(NamedTuple):
    """The terms of one candidate's cost, in milliseconds."""

    target_prefill: float
    draft_prefill: float
    backlog: float
    decode: float
    queue: float
    eviction: float

    @property
    def total(self) -> float:
        return sum(self)


def expected_frontier(query: DispatchQuery, info: WorkerInfo, depth: Depth) -> Frontier:
    """Tokens of the prompt reusable on the worker."""
    target, draft = _reusable(query, info, depth)
    return Frontier(target=target, draft=draft, joint=target if draft is None else min(target, draft))


def lacking_tokens(query: DispatchQuery, info: WorkerInfo, depth: Depth) -> tuple[int, int]:
    """Prompt tokens that the target and the draft have to compute."""
    target, draft = _reusable(query, info, depth)
    if draft is None:
        return query.n_tokens - target, 0
    if info.coupling is Coupling.JOINT:
        target = draft = min(target, draft)
    return query.n_tokens - target, query.n_tokens - draft


def _reusable(query: DispatchQuery, info: WorkerInfo, depth: Depth) -> tuple[int, int | None]:
    """Tokens that the target and the draft (None: it takes no part) hold. The last one is always recomputed: its logits
    are needed."""
    block_size, most = query.block_size, query.n_tokens - 1
    target = min(depth.target * block_size, most)
    if info.coupling is Coupling.NONE or not query.speculate:
        return target, None
    return target, min(depth.draft * block_size, most)


def prefill_ms(query: DispatchQuery, info: WorkerInfo, depth: Depth, model: CostModel) -> float:
    """Predicted work until the request's first token, in both models."""
    target, draft = lacking_tokens(query, info, depth)
    return model.target_ms(query.n_tokens - target, target) + draft * model.draft_token_ms


def prefill_weight(query: DispatchQuery, mean_backlog_ms: float, model: CostModel) -> float:
    """What a millisecond of prefill costs, in milliseconds of waiting. 1 as long as queues are short: recomputing a
    prefix on a free worker harms nobody. In a crowded fleet it delays others, and if requests left their prefixes
    because of the queues, the queues would only grow."""
    crowding = mean_backlog_ms / model.target_ms(0, query.n_tokens) - model.crowding_slack
    return 1.0 + model.crowding_weight * max(0.0, crowding)


def decode_ms(candidate: Candidate, model: CostModel) -> float:
    """What sharing steps with the requests there costs."""
    return candidate.in_flight * model.decode_request_ms / candidate.acceptance


def queue_ms(stored: float, candidate: Candidate, model: CostModel) -> float:
    """The wait until requests that run now have ended, for a place in the batch or for the blocks of `stored`
    tokens."""
    ahead = max(0.0, candidate.in_flight + 1 - candidate.info.max_running)
    if stored > candidate.room_tokens:
        ahead = max(ahead, (stored - candidate.room_tokens) / max(1.0, candidate.request_tokens))
    return ahead * model.queued_request_ms


def cost_of(query: DispatchQuery, candidate: Candidate, model: CostModel, weight: float = 1.0) -> Cost:
    """`weight` is the fleet's `prefill_weight`."""
    target, draft = lacking_tokens(query, candidate.info, candidate.depth)
    stored = max(0, query.n_tokens - candidate.depth.target * query.block_size)
    evicted = max(0.0, stored - max(0.0, candidate.free_tokens))
    return Cost(
        target_prefill=weight * model.target_ms(query.n_tokens - target, target),
        draft_prefill=weight * draft * model.draft_token_ms,
        backlog=candidate.backlog_ms,
        decode=decode_ms(candidate, model),
        queue=max(0.0, queue_ms(stored, candidate, model) - candidate.backlog_ms),
        eviction=evicted * model.eviction_weight * model.target_token_ms,
    )


def choose(
    query: DispatchQuery, candidates: Sequence[Candidate], model: CostModel, rng: random.Random, weight: float = 1.0
) -> Candidate | None:
    """The cheapest candidate; equal ones are told apart at random, so that idle workers share the load."""
    if not candidates:
        return None
    costs = [cost_of(query, candidate, model, weight).total for candidate in candidates]
    cheapest = min(costs)
    return rng.choice([candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == cheapest])
