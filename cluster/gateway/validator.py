"""The one place that decides whether a request may run, for every protocol.

Owns all limits on requests. Invariant: what passes is bounded in every field, so nothing behind the gateway has to ask
again; what doesn't is refused with an `InvalidRequest` that names field, value, limit and remedy, before anything is
allocated. Pure: no wire types, no tokenizer. Called by `cluster.gateway.service` and the HTTP edge: `check` before
tokenizing, `admit` after it.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from cluster.core.sampling import SamplingParams
from cluster.errors import InvalidRequest, ModelNotFound, PromptTooLarge
from cluster.gateway.grammar_limits import check_grammar
from cluster.gateway.request import (
    ChatMessage,
    ChatPrompt,
    Prompt,
    RequestFields,
    SamplingFields,
    TextPrompt,
    TokenPrompt,
)
from cluster.routing.types import ModelCard, PoolSize

DEFAULT_MAX_TOKENS = 256
MAX_MESSAGES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64
ROLES = ("system", "user", "assistant")

# No tokenizer in use has longer tokens, so more characters than this per token of max_len can't fit: refused unread.
_MAX_CHARS_PER_TOKEN = 128
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Bound:
    """The numbers from `low` to `high`, both included, and whatever `also` names."""

    low: float
    high: float
    also: float | None = None

    def check(self, field: str, value: float) -> None:
        """Raises InvalidRequest unless `value` is a finite number inside the bound."""
        if value == self.also:
            return
        if not (math.isfinite(value) and self.low <= value <= self.high):
            raise InvalidRequest(field, value, str(self), "send a number in that range or leave it unset")

    def __str__(self) -> str:
        also = f"{self.also:g} or " if self.also is not None else ""
        return f"{also}from {_number(self.low)} to {_number(self.high)}"


# Lower ends above 0 keep the logits finite: dividing by less would overflow float32.
_BOUNDS = {
    "temperature": Bound(0.01, 2, also=0),
    "top_p": Bound(1e-6, 1),
    "min_p": Bound(0, 1),
    "seed": Bound(0, 2**64 - 1),
    "presence_penalty": Bound(-2, 2),
    "frequency_penalty": Bound(-2, 2),
    "repetition_penalty": Bound(0.01, 10),
    "logprobs": Bound(0, 20),
}
_PRIORITY = Bound(-100, 100)


@dataclass(frozen=True, slots=True)
class Validator:
    """Checks requests against the model that is served and the KV pools that a request can't do without."""

    model: ModelCard
    pools: tuple[PoolSize, ...] = ()
    """The target's; speculation steps aside where the draft's is too small."""

    def check(self, request: RequestFields) -> None:
        """All that can be said before tokenizing. Raises InvalidRequest or ModelNotFound."""
        if request.request_id and not _REQUEST_ID.fullmatch(request.request_id):
            raise InvalidRequest(
                "request_id", request.request_id, "1 to 128 of the characters A-Z a-z 0-9 . _ : -", "choose another id"
            )
        if request.model and request.model != self.model.name:
            raise ModelNotFound(request.model, (self.model.name,))
        if request.worker_id and not _REQUEST_ID.fullmatch(request.worker_id):
            limit = "1 to 128 of the characters A-Z a-z 0-9 . _ : -"
            raise InvalidRequest("worker_id", request.worker_id, limit, "name a worker as ClusterStatus does")
        if request.priority is not None:
            _PRIORITY.check("priority", request.priority)
        self._check_prompt(request.prompt)
        self._check_sampling(request.sampling)

    def admit(self, request: RequestFields, prompt: Sequence[int]) -> SamplingParams:
        """All that needs the prompt's tokens: lengths and pools. Returns the parameters with every default filled in.

        Raises InvalidRequest, or PromptTooLarge when prompt and output can't fit a pool even alone.
        """
        self._check_length(prompt)
        max_tokens = self._max_tokens(request.sampling.max_tokens, len(prompt))
        self._check_pools(len(prompt), max_tokens)
        if request.sampling.min_tokens is not None:
            Bound(0, max_tokens).check("min_tokens", request.sampling.min_tokens)
        given = {field.name: getattr(request.sampling, field.name) for field in fields(SamplingFields)}
        set_fields = {name: value for name, value in given.items() if value is not None}
        return SamplingParams(**{**set_fields, "max_tokens": max_tokens})

    def _check_length(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise InvalidRequest("prompt", "empty", "at least 1 token", "send some text")
        if len(prompt) >= self.model.max_len:
            limit = f"at most {self.model.max_len - 1} tokens, one less than the model's max_len"
            raise InvalidRequest("prompt", f"{len(prompt)} tokens long", limit, "shorten the prompt")

    def _max_tokens(self, wanted: int | None, prompt_tokens: int) -> int:
        room = self.model.max_len - prompt_tokens
        if wanted is None:
            # At least one: a prompt that leaves its pool no room at all is refused with the pool's numbers.
            left = [pool.num_tokens - prompt_tokens + 1 for pool in self.pools]
            return max(1, min(DEFAULT_MAX_TOKENS, room, *left))
        if wanted > room:
            limit = f"at most {room}: max_len is {self.model.max_len} and the prompt has {prompt_tokens} tokens"
            raise InvalidRequest("max_tokens", wanted, limit, "lower it, shorten the prompt, or leave it unset")
        return wanted

    def _check_prompt(self, prompt: Prompt | None) -> None:
        match prompt:
            case None:
                raise InvalidRequest("prompt", "missing", "text, chat messages or token ids", "send one of them")
            case TextPrompt(text):
                if not text:
                    raise InvalidRequest("prompt", "empty", "at least 1 token", "send some text")
                self._check_text("prompt", text)
            case ChatPrompt(messages):
                _check_count("messages", len(messages), 1, MAX_MESSAGES, "messages")
                for index, message in enumerate(messages):
                    self._check_message(f"messages[{index}]", message)
                self._check_text("messages", "".join(message.content for message in messages))
            case TokenPrompt(ids):
                _check_count("prompt", len(ids), 1, self.model.max_len - 1, "tokens")
                self._check_token_ids("prompt", ids)

    def _check_message(self, field: str, message: ChatMessage) -> None:
        if message.role not in ROLES:
            raise InvalidRequest(f"{field}.role", message.role, f"one of {', '.join(ROLES)}", "name one of these")

    def _check_text(self, field: str, text: str) -> None:
        limit = self.model.max_len * _MAX_CHARS_PER_TOKEN
        if len(text) > limit:
            at_most = f"at most {limit} characters for a model with a max_len of {self.model.max_len} tokens"
            raise InvalidRequest(field, f"{len(text)} characters long", at_most, "shorten the prompt")
        _check_encodable(field, text)

    def _check_token_ids(self, field: str, ids: Sequence[int]) -> None:
        if ids and (min(ids) < 0 or max(ids) >= self.model.vocab_size):
            index = next(i for i, token in enumerate(ids) if not 0 <= token < self.model.vocab_size)
            limit = f"from 0 to {self.model.vocab_size - 1}, the token ids of the model"
            raise InvalidRequest(f"{field}[{index}]", ids[index], limit, "tokenize with the model's own tokenizer")

    def _check_sampling(self, sampling: SamplingFields) -> None:
        for name, bound in _BOUNDS.items():
            value = getattr(sampling, name)
            if value is not None:
                bound.check(name, value)
        if sampling.top_k is not None:
            Bound(1, self.model.vocab_size).check("top_k", sampling.top_k)
        if sampling.max_tokens is not None:
            Bound(1, self.model.max_len - 1).check("max_tokens", sampling.max_tokens)
        if sampling.min_tokens is not None:
            Bound(0, self.model.max_len - 1).check("min_tokens", sampling.min_tokens)
        _check_count("stop", len(sampling.stop), 0, MAX_STOP_STRINGS, "strings")
        for index, stop in enumerate(sampling.stop):
            _check_count(f"stop[{index}]", len(stop), 1, MAX_STOP_CHARS, "characters")
            _check_encodable(f"stop[{index}]", stop)
        _check_count("stop_token_ids", len(sampling.stop_token_ids), 0, MAX_STOP_TOKENS, "token ids")
        self._check_token_ids("stop_token_ids", sampling.stop_token_ids)
        if sampling.grammar is not None:
            _check_encodable(f"structured_output.{sampling.grammar.kind}", sampling.grammar.text)
            check_grammar(sampling.grammar)
            _check_ends(sampling)

    def _check_pools(self, prompt_tokens: int, max_tokens: int) -> None:
        for pool in self.pools:
            # The last token is given out, but never computed.
            needed = math.ceil((prompt_tokens + max_tokens - 1) / pool.block_size)
            if needed > pool.num_blocks:
                largest = max(0, pool.num_tokens - max_tokens + 1)
                raise PromptTooLarge(needed, pool.num_blocks, largest, pool.name)


def _check_ends(sampling: SamplingFields) -> None:
    """With a grammar, the output ends when it is complete: nothing may end it before or keep it from ending."""
    for field in ("stop", "ignore_eos", "min_tokens"):
        value = getattr(sampling, field)
        if value:
            shown = ", ".join(value) if isinstance(value, tuple) else str(value).lower()
            raise InvalidRequest(field, shown, "unset with structured_output, which says where to end", "leave one out")


def _check_count(field: str, count: int, least: int, most: int, unit: str) -> None:
    if count < least:
        raise InvalidRequest(field, "empty", f"{least} to {most} {unit}", "add some")
    if count > most:
        raise InvalidRequest(field, f"{count} {unit} long", f"{least} to {most} {unit}", "shorten it")


def _check_encodable(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        value = f"a text with the lone surrogate U+{ord(text[error.start]):04X} at index {error.start}"
        raise InvalidRequest(field, value, "text that UTF-8 can encode", "remove that code unit") from error


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
