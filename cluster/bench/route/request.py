"""What is simulated: requests, and what became of each.

A prompt is the sequence of its full KV blocks, each named by a number that stands for the block and all before it, as
a block key does: two prompts share exactly the blocks whose numbers they share. A block's number is larger than its
parent's. Made by the traces and generators, consumed by `simulation`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SimRequest:
    number: int
    at: float
    """Arrival, in seconds from the start."""
    prompt_tokens: int
    output_tokens: int
    prompt: tuple[int, ...]
    """The prompt's full blocks."""
    whole: tuple[int, ...]
    """Full blocks of prompt and answer, as far as later requests may name them; begins with `prompt`."""
    session: int
    """Requests of one conversation share it: what a client sends as a session header."""
    speculative: bool = True
    acceptance: float = 2.4
    """Tokens that a decode step yields if it speculates."""

    @property
    def tokens_per_step(self) -> float:
        return self.acceptance if self.speculative else 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request from arrival to end. Times in seconds from its arrival, depths in tokens of its prompt."""

    request: SimRequest
    worker: int
    ttft: float
    end_to_end: float
    reused_target: int
    reused_draft: int
    """0 for a plain request, which uses no draft pool."""
    reused_joint: int
    """What it really didn't have to compute in the target."""


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    block_size: int
    requests: tuple[SimRequest, ...]
    """In order of arrival."""


@dataclass(slots=True)
class BlockNumbers:
    """Gives out numbers for blocks that nobody shares yet."""

    given: int = field(default=0)

    def fresh(self, count: int) -> tuple[int, ...]:
        first = self.given
        self.given += count
        return tuple(range(first, self.given))
