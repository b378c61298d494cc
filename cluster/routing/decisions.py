"""The scheduler's last decisions, so that each can explain itself: who was priced, at what, and who was passed over.

Invariant: at most `limit` are kept, the oldest go first; a decision holds what was true when it was made, without the
prompt's keys. What it says is worked out when somebody asks, so keeping one costs a placement next to nothing. Owned
by `cluster.routing.router`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.routing.policy import Candidate, CostModel, cost_of, expected_frontier
from cluster.routing.types import DispatchQuery


@dataclass(frozen=True, slots=True)
class PricedWorker:
    """A candidate as the policy saw it."""

    worker_id: str
    target_tokens: int
    draft_tokens: int | None
    """Prompt tokens that it was believed to hold; None: no draft takes part."""
    cost_ms: Mapping[str, float]
    """The terms of its cost by name; the lowest sum won."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """One decision, for people. Immutable and plain, as it crosses a process boundary."""

    request_id: str
    """As the scheduler knows the request: the client's id, and what tells attempts apart."""
    age_s: float
    prompt_tokens: int
    chosen: str | None
    """None: the request was refused."""
    candidates: tuple[PricedWorker, ...]
    """Cheapest first."""
    passed_over: Mapping[str, str]
    """Worker id -> why it was not priced."""


@dataclass(frozen=True, slots=True)
class Decision:
    query: DispatchQuery
    at: float
    """Seconds on the router's clock."""
    candidates: tuple[Candidate, ...]
    weight: float
    """What a millisecond of prefill cost in this fleet at that moment."""
    chosen: str | None
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def explain(self, costs: CostModel, now: float) -> Explanation:
        priced = [self._priced(candidate, costs) for candidate in self.candidates]
        return Explanation(
            request_id=self.query.request_id,
            age_s=now - self.at,
            prompt_tokens=self.query.n_tokens,
            chosen=self.chosen,
            candidates=tuple(sorted(priced, key=lambda each: sum(each.cost_ms.values()))),
            passed_over=dict(self.passed_over),
        )

    def _priced(self, candidate: Candidate, costs: CostModel) -> PricedWorker:
        held = expected_frontier(self.query, candidate.info, candidate.depth)
        cost = cost_of(self.query, candidate, costs, self.weight)
        return PricedWorker(candidate.info.worker_id, held.target, held.draft, cost._asdict())


class Decisions:
    def __init__(self, limit: int = 2048) -> None:
        self._kept: deque[Decision] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, decision: Decision) -> None:
        """Its query is to hold no keys."""
        self._kept.append(decision)

    def find(self, request_id: str, tenant: str) -> list[Decision]:
        """The decisions about one of the tenant's requests, oldest first: one for each attempt. The id is the client's,
        or the scheduler's own."""
        return [
            decision
            for decision in self._kept
            if decision.query.tenant == tenant
            and request_id in (decision.query.request_id, decision.query.request_id.rpartition("-")[0])
        ]
