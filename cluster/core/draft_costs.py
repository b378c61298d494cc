"""What one more draft costs, as a share of a step without drafts: given, or measured while requests run.

Invariant: costs decide how much is drafted, never which tokens come out. `MeasuredCosts` is fed by the step runner with
the times of its steps, and asked by `AdaptiveDraftLength` and `PredictedGaps`; all on the engine's thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class DraftCosts(Protocol):
    """The time model of a step."""

    def per_draft(self, running: int) -> float:
        """By how much a step grows for each draft of every request, while so many run; 1 is a step without drafts."""

    def per_prompt_token(self) -> float:
        """Time to compute one more token of a prompt in target and draft; 1 is a decode step."""


@dataclass(frozen=True, slots=True)
class FixedCosts:
    """`draft` for a pass of the drafter, whatever the batch, and `token` for each token that the target verifies."""

    draft: float = 0.08
    token: float = 0.01

    def per_draft(self, running: int) -> float:
        return self.draft + self.token * running

    def per_prompt_token(self) -> float:
        return self.token


@dataclass(slots=True)
class _Line:
    """A least-squares line through points that fade by `memory` with each new one."""

    memory: float
    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        for name, value in (("weight", 1.0), ("x", x), ("y", y), ("xx", x * x), ("xy", x * y)):
            setattr(self, name, getattr(self, name) * self.memory + value)

    @property
    def slope(self) -> float | None:
        """Never negative; None while all points lie above one another."""
        spread = self.weight * self.xx - self.x * self.x
        if spread <= 1e-6 * self.xx * self.weight:
            return None
        return max(0.0, (self.weight * self.xy - self.x * self.y) / spread)

    def at(self, x: float) -> float:
        """The line's height; the mean of all points where it has no slope. Never below a tenth of that mean."""
        mean = self.y / self.weight
        return max(0.1 * mean, mean + (self.slope or 0.0) * (x - self.x / self.weight))


@dataclass(slots=True)
class MeasuredCosts:
    """Learns from steps in which every row decodes: the target's time over its tokens, the drafter's over the depth of
    its drafts; and from the others what tokens of prompts cost. Until `enough` steps were seen, `prior` answers."""

    prior: DraftCosts = field(default_factory=FixedCosts)
    memory: float = 0.99
    enough: int = 16
    _steps: int = 0
    _drafts: float = 0.0
    _depths: float = 0.0
    _target: _Line = field(init=False)
    _drafter: _Line = field(init=False)
    _prompt: _Line = field(init=False)

    def __post_init__(self) -> None:
        self._target, self._drafter, self._prompt = _Line(self.memory), _Line(self.memory), _Line(self.memory)

    def observe(self, rows: int, drafts: int, verified_depth: int, target_s: float, depth: int, draft_s: float) -> None:
        """A step verified `drafts` tokens, of `verified_depth` over all rows, beside one token for each of its `rows`,
        in `target_s`; then it took `draft_s` to propose drafts of up to `depth`. Seconds."""
        self._steps += 1
        self._drafts = self._drafts * self.memory + drafts
        self._depths = self._depths * self.memory + verified_depth
        self._target.add(rows + drafts, target_s)
        self._drafter.add(depth, draft_s)

    def observe_prompt(self, tokens: int, seconds: float) -> None:
        """A step with tokens of prompts among its `tokens` took so long, drafting included."""
        self._prompt.add(tokens, seconds)

    def per_draft(self, running: int) -> float:
        step = self._target.at(running) if self._steps else 0.0
        if self._steps < self.enough or step <= 0:
            return self.prior.per_draft(running)
        nodes = self._drafts / self._depths if self._depths else 1.0  # above 1 for trees
        return (self._draft_s() + (self._target.slope or 0.0) * running * nodes) / step

    def per_prompt_token(self) -> float:
        slope = self._prompt.slope
        if self._steps < self.enough or slope is None:
            return self.prior.per_prompt_token()
        return slope * self._target.weight / (self._target.y + self._drafter.y)

    def _draft_s(self) -> float:
        """Seconds for each level of drafts. Where the depth never varied, all of the drafter's time is theirs."""
        slope = self._drafter.slope
        if slope is not None:
            return slope
        return self._drafter.y / self._drafter.x if self._drafter.x else 0.0
