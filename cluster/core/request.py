"""A request on its way through a worker.

Owns what changes while a request runs: its output, its unverified drafts and its hold on the caches. One thread, the
step loop's, owns every `Request`. Invariant: a request that isn't running holds no block of any pool.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.core.draft_length import Acceptance
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.core.frontier import Frontier
from cluster.core.handle import CacheHandle
from cluster.core.sampling import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. STOP and LENGTH are the two good ends."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    REJECTED = "rejected"


class RequestStatus(StrEnum):
    """WAITING covers both a new request and one that was preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """`priority`: the lower number goes first. `deadline`: on the clock of `Admission.plan`'s `now`, or None.

    `arrival` counts submissions and `rank` orders requests, the lower first; `Admission.submit` sets both. `drafts`
    are proposed tokens that the next step verifies. `first_frontier` is what the first claim reused, `finish` the
    reason once `status` is FINISHED."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival: int = 0
    rank: tuple[int, int] = (0, 0)
    priority: int = 0
    deadline: float | None = None
    tenant_salt: bytes = b""
    lora: str | None = None
    speculate: bool = True
    reuse: bool = True
    output: list[int] = field(default_factory=list)
    drafts: Drafts = NO_DRAFTS
    status: RequestStatus = RequestStatus.WAITING
    handle: CacheHandle | None = None
    preemptions: int = 0
    first_frontier: Frontier | None = None
    finish: FinishReason | None = None
    acceptance: Acceptance = field(default_factory=Acceptance)

    @property
    def num_known(self) -> int:
        """Tokens of prompt and output; drafts don't count."""
        return len(self.prompt) + len(self.output)

    def known(self, start: int, end: int) -> tuple[int, ...]:
        """Known tokens at positions [start, end)."""
        split = len(self.prompt)
        if end <= split:
            return self.prompt[start:end]
        return self.prompt[start:] + tuple(self.output[max(0, start - split) : end - split])
