"""The output side of one request: text, stop conditions and usage.

Owns the decision how many of the tokens that a step yields count: a stop token, a stop string, `max_tokens` or the
length limit may end the request in the middle of an accepted run of drafts, and what follows is dropped as if it had
never been drafted. Invariant: text, ids and finish reason depend on the token sequence only, not on how many came per
step. Used by the engine, one per request.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.request import FinishReason, Request
from cluster.core.stop import StopMatcher
from cluster.engine.detokenizer import IncrementalDetokenizer
from cluster.engine.events import RequestEvent, Usage
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.sampler import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Taken:
    """What counts of the tokens offered: `tokens`, the text they release, and why the request ends here, if it does."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    text: str
    finish: FinishReason | None


@dataclass(slots=True)
class RequestOutput:
    """State of one request's output. `tokens` are prompt and output. Without a tokenizer (`detokenizer` is None)
    there is no text. `grammar` stands after the output's tokens.
    """

    request: Request
    detokenizer: IncrementalDetokenizer | None
    eos_ids: frozenset[int]
    grammar: GrammarMatcher | None = None
    matcher: StopMatcher = field(init=False)
    tokens: list[int] = field(init=False)
    seed: int = field(init=False)
    count: int = 0
    decode_steps: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.matcher = StopMatcher(sampling.stop)
        self.tokens = list(self.request.prompt)
        self.seed = secrets.randbits(63) if sampling.seed is None else sampling.seed

    def take(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], drafted: int) -> Taken:
        """Offer the tokens of one step (of which all but the last were drafted), and the number of drafts verified."""
        pieces: list[str] = []
        finish = None
        taken = 0
        for token in tokens:
            taken += 1
            self.count += 1
            self.tokens.append(token)
            if self.grammar is not None:
                self.grammar.accept(token)
            finish = self._accept(token, pieces)
            if finish is not None:
                break
        self._count_step(min(taken, len(tokens) - 1), drafted)
        kept = tuple(entry for entry in logprobs[:taken] if entry is not None)
        asked = self.request.sampling.logprobs is not None
        return Taken(tuple(tokens[:taken]), kept if asked else None, "".join(pieces), finish)

    def _count_step(self, accepted: int, drafted: int) -> None:
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.decode_steps += 1
        if drafted:
            self.draft_steps += 1
            self.drafted += drafted
            self.accepted += accepted

    def _accept(self, token: int, pieces: list[str]) -> FinishReason | None:
        sampling = self.request.sampling
        may_stop = self.count >= sampling.min_tokens
        ends = token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.eos_ids)
        if may_stop and ends:  # the token itself has no text for the user
            pieces.append(self._flush())
            return FinishReason.STOP
        if self._emit(token, pieces, may_stop):
            return FinishReason.STOP
        if self.count >= sampling.max_tokens:
            pieces.append(self._flush())
            return FinishReason.LENGTH
        return None

    def _emit(self, token: int, pieces: list[str], may_stop: bool) -> bool:
        """Release the token's text; whether a stop string is complete. Text before `min_tokens` never matches."""
        if self.detokenizer is None:
            return False
        text, matched = self.detokenizer.feed((token,)), False
        if may_stop:
            text, matched = self.matcher.feed(text)
        pieces.append(text)
        return matched

    def _flush(self) -> str:
        """Text held back because a stop string or a character might have been completed."""
        if self.detokenizer is None:
            return ""
        text, _ = self.matcher.feed(self.detokenizer.flush())
        return text + self.matcher.flush()

    def usage(self) -> Usage:
        frontier = self.request.first_frontier
        ended = time.perf_counter()
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=self.count,
            reused_target=frontier.target if frontier else 0,
            reused_draft=(frontier.draft or 0) if frontier else 0,
            reused_joint=frontier.joint if frontier else 0,
            decode_steps=self.decode_steps,
            draft_steps=self.draft_steps,
            drafted=self.drafted,
            accepted=self.accepted,
            preemptions=self.request.preemptions,
            ttft_s=None if self.first_token is None else self.first_token - self.started,
            total_s=ended - self.started,
        )

    def last_event(self, finish: FinishReason) -> RequestEvent:
        """The closing event of a request that ends without new tokens."""
        return RequestEvent(self.request.request_id, text=self._flush(), finish=finish, usage=self.usage())
