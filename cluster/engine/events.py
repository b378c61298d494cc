"""What goes into the engine and what comes out: requests, and per step the events of each request.

Invariant: of one request's events, the joined `token_ids` and `text` are its output, and exactly the last has
`finish` and `usage`. Made by the engine thread, read by the loop and the worker's service.
"""

from __future__ import annotations

from dataclasses import dataclass

from cluster.core.request import FinishReason
from cluster.core.sampling import SamplingParams
from cluster.engine.sampler import TokenLogprobs
from cluster.errors import TandemError


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One generation. `prompt` are token ids; `deadline` is a `time.monotonic` value; lower `priority` runs first."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    deadline: float | None = None
    tenant_salt: bytes = b""
    speculate: bool = True
    reuse: bool = True


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of a finished request.

    Tokens: `reused_*` are the prompt tokens whose KV was found at the first claim, in the target's pool, the draft's,
    and in both at once (or was left out by the draft, where `draft_gap` says so). `draft_steps` are target forwards
    that verified drafts; `decode_steps` all that yielded tokens.
    """

    prompt_tokens: int
    completion_tokens: int
    reused_target: int
    reused_draft: int
    reused_joint: int
    decode_steps: int
    draft_steps: int
    drafted: int
    accepted: int
    preemptions: int
    ttft_s: float | None
    total_s: float

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a target step as vLLM counts it: 1 + accepted / steps with drafts; None without such steps."""
        return 1 + self.accepted / self.draft_steps if self.draft_steps else None


@dataclass(frozen=True, slots=True)
class RequestEvent:
    """News of one request. `error` is set when `finish` is ERROR; `logprobs` has one entry per token if asked for."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    error: TandemError | None = None

    def then(self, later: RequestEvent) -> RequestEvent:
        """The two events as one."""
        both = self.logprobs is not None or later.logprobs is not None
        return RequestEvent(
            self.request_id,
            self.token_ids + later.token_ids,
            self.text + later.text,
            (self.logprobs or ()) + (later.logprobs or ()) if both else None,
            later.finish,
            later.usage,
            later.error,
        )
