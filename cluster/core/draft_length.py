"""How many tokens to draft for a request: always the same number, or what recent acceptance and load make worthwhile.

Invariant: the choice changes the speed of a request, never its tokens, and never leaves a hole in the draft's KV: where
nothing is drafted, the draft's KV is kept up all the same, so that drafting can resume and prefixes stay reusable.
Called by `StepBuilder` (choose) and `Admission` (observe).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from cluster.core.draft_costs import DraftCosts


@dataclass(slots=True)
class Acceptance:
    """What became of one request's drafts lately. Starts as if a few drafts had been tried at even odds."""

    tried: float = 4.0
    hits: float = 2.0
    idle_steps: int = 0
    """Steps since drafts were last verified."""

    @property
    def rate(self) -> float:
        """Estimated probability that the next draft is accepted, given that those before it were."""
        return self.hits / self.tried

    def observe(self, drafted: int, accepted: int, memory: float) -> None:
        """A step verified `drafted` tokens, of which the first `accepted` were right; older steps fade by `memory`."""
        if not drafted:
            self.idle_steps += 1
            return
        self.idle_steps = 0
        # Drafts after the first wrong one were not put to the test.
        self.tried = self.tried * memory + min(drafted, accepted + 1)
        self.hits = self.hits * memory + accepted


class DraftLength(Protocol):
    """Chooses K, the number of tokens to draft."""

    def choose(self, acceptance: Acceptance, running: int, most: int) -> int:
        """K for a request of this history while so many run; from 0 to `most`."""


@dataclass(frozen=True, slots=True)
class FixedDraftLength:
    """As many as the drafter was configured for."""

    def choose(self, acceptance: Acceptance, running: int, most: int) -> int:
        return most


@dataclass(frozen=True, slots=True)
class AdaptiveDraftLength:
    """The K with the most tokens per unit of time.

    A step that verifies K drafts with acceptance rate a yields (1 - a^(K+1)) / (1 - a) tokens on average (Leviathan
    et al. 2023, eq. 1). Its time, in units of a step without drafts, is 1 + K * costs.per_draft(running): the drafter
    runs K times for the whole batch, and each row brings K more tokens to the target. Where K is 0, one draft is tried
    every `retry` steps, to see whether times changed."""

    costs: DraftCosts
    retry: int = 32

    def choose(self, acceptance: Acceptance, running: int, most: int) -> int:
        rate = min(acceptance.rate, 0.999)
        marginal = self.costs.per_draft(running)
        best, highest, tokens = 0, 1.0, 1.0
        for length in range(1, most + 1):
            tokens += rate**length
            gain = tokens / (1 + length * marginal)
            if gain > highest:
                best, highest = length, gain
        if not best and most and acceptance.idle_steps >= self.retry:
            return 1
        return best


MEMORY = 0.9
"""How much of a step's weight is left after the next one: the last ten or so count."""
