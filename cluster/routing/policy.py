"""What placing a request on a worker would cost, in predicted milliseconds, and which candidate is cheapest.

Cost = prefill of what the target pool lacks + prefill of what the draft pool lacks + the prefill already waiting
there + the share of decode steps + the wait for a free place in the batch. A hidden-state draft reuses only to the
joint frontier, so both pools are priced from there; an independent draft catches up alone, so each pool is priced
from its own depth.

Pure and stateless: `cluster.routing.router` gathers the candidates and reserves the winner; a simulator can do the
same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.frontier import Frontier
from cluster.core.handle import Coupling
from cluster.routing.prefix_map import Depth
from cluster.routing.types import DispatchQuery, WorkerInfo


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds per unit of work on one kind of worker. The defaults fit a small model on two CPU cores; only their
    ratios matter for the choice."""

    target_token_ms: float = 1.0
    draft_token_ms: float = 0.1
    decode_request_ms: float = 10.0
    """Slower decoding that each request already running there means for the new one."""
    queued_request_ms: float = 2000.0
    """Wait for each request that stands before the new one once the batch is full."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take the request, with what it holds of the prompt and what it has to do already."""

    info: WorkerInfo
    depth: Depth
    in_flight: int
    prefill_tokens: int
    """Prompt tokens that wait to be computed there."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The terms of one candidate's cost, in milliseconds."""

    target_prefill: float
    draft_prefill: float
    backlog: float
    decode: float
    queue: float

    @property
    def total(self) -> float:
        return self.target_prefill + self.draft_prefill + self.backlog + self.decode + self.queue


def expected_frontier(query: DispatchQuery, info: WorkerInfo, depth: Depth) -> Frontier:
    """Tokens of the prompt reusable on the worker. The last one is always recomputed: its logits are needed."""
    block_size, most = info.model.block_size, query.n_tokens - 1
    target = min(depth.target * block_size, most)
    if info.coupling is Coupling.NONE or not query.speculate:
        return Frontier(target=target, draft=None, joint=target)
    draft = min(depth.draft * block_size, most)
    return Frontier(target=target, draft=draft, joint=min(target, draft))


def lacking_tokens(query: DispatchQuery, info: WorkerInfo, depth: Depth) -> tuple[int, int]:
    """Prompt tokens that the target and the draft have to compute."""
    frontier = expected_frontier(query, info, depth)
    if frontier.draft is None:
        return query.n_tokens - frontier.target, 0
    if info.coupling is Coupling.JOINT:
        return query.n_tokens - frontier.joint, query.n_tokens - frontier.joint
    return query.n_tokens - frontier.target, query.n_tokens - frontier.draft


def cost_of(query: DispatchQuery, candidate: Candidate, model: CostModel) -> Cost:
    target, draft = lacking_tokens(query, candidate.info, candidate.depth)
    queued = max(0, candidate.in_flight + 1 - candidate.info.max_running)
    return Cost(
        target_prefill=target * model.target_token_ms,
        draft_prefill=draft * model.draft_token_ms,
        backlog=candidate.prefill_tokens * model.target_token_ms,
        decode=candidate.in_flight * model.decode_request_ms,
        queue=queued * model.queued_request_ms,
    )


def choose(
    query: DispatchQuery, candidates: Sequence[Candidate], model: CostModel, rng: random.Random
) -> Candidate | None:
    """The cheapest candidate; equal ones are told apart at random, so that idle workers share the load."""
    if not candidates:
        return None
    costs = [cost_of(query, candidate, model).total for candidate in candidates]
    cheapest = min(costs)
    return rng.choice([candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == cheapest])
