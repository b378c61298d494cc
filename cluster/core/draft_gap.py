"""Whether a request starts behind a hole in its draft's KV, where the draft's pool holds less of it than the target's.

That happens when draft blocks were evicted, or when a prefix was computed without speculation. Clipped, the request
computes the gap again in both models, and its drafts are as good as ever. Skipped, it starts at once, and its draft
attends to what there is: fewer drafts are right. Invariant: the choice changes times, never tokens. Only for drafts
that read the target's states; others catch up alone. Called by `Admission`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class DraftGap(StrEnum):
    """The choices of a configuration."""

    CLIP = "clip"
    SKIP = "skip"
    AUTO = "auto"


class GapPolicy(Protocol):
    """Decides, and learns from what became of the drafts."""

    def skips(self, gap: int, most_tokens: int) -> bool:
        """Whether to leave a gap of so many tokens, for a request that may yet generate `most_tokens`."""

    def observe(self, hole: bool, accepted: int) -> None:
        """A step verified drafts of a request, with a hole in the draft's KV or without, and accepted so many."""


@dataclass(frozen=True, slots=True)
class FixedGaps:
    """Skips all gaps, or none."""

    skip: bool = False

    def skips(self, gap: int, most_tokens: int) -> bool:
        return self.skip

    def observe(self, hole: bool, accepted: int) -> None:
        """Nothing is learnt."""


class PromptCosts(Protocol):
    """The time of a prompt's tokens."""

    def per_prompt_token(self) -> float:
        """Time to compute one more token of a prompt in target and draft; 1 is a decode step."""


@dataclass(slots=True)
class _Accepted:
    """Accepted drafts a step, on average; older steps fade."""

    steps: float
    accepted: float
    memory: float = 0.99

    def add(self, accepted: int) -> None:
        self.steps = self.steps * self.memory + 1
        self.accepted = self.accepted * self.memory + accepted


@dataclass(slots=True)
class PredictedGaps:
    """Skips where that is predicted to end the request sooner.

    With a accepted drafts a step, n tokens take n / (1 + a) steps. So computing the gap again pays if

        gap * per_prompt_token  <  n / (1 + a with a hole) - n / (1 + a without)

    where n is the most that the request may generate. Both averages are those of all requests of this worker; before
    steps with a hole were seen, they count as half as good as those without, and as so many steps (`assumed`).
    """

    costs: PromptCosts
    assumed: float = 16.0
    _whole: _Accepted = field(default_factory=lambda: _Accepted(steps=1.0, accepted=1.0))
    _hole: _Accepted = field(default_factory=lambda: _Accepted(steps=0.0, accepted=0.0))

    def skips(self, gap: int, most_tokens: int) -> bool:
        whole = self._whole.accepted / self._whole.steps
        hole = (self._hole.accepted + self.assumed * whole / 2) / (self._hole.steps + self.assumed)
        return gap * self.costs.per_prompt_token() >= most_tokens * (1 / (1 + hole) - 1 / (1 + whole))

    def observe(self, hole: bool, accepted: int) -> None:
        if hole:
            self.assumed *= self._hole.memory
        (self._hole if hole else self._whole).add(accepted)
