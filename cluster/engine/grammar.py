"""Compiles the grammars of requests, for one model's tokenizer.

Compiling happens in a thread of its own, so that the engine's steps go on, and only after a trial in a process of its
own (`grammar_trial`). Invariant: a grammar is compiled once while it stays among the last ones used, and one that was
refused is refused again without another trial. Called by the engine and its loop. One per engine.

Masks come from llguidance, which refuses a schema that it can't enforce, bounds the work of each mask and needs no
other package. xgrammar 0.2.9 was the alternative: it ignores such keywords, and its wheel brings Triton along.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from cluster.core.sampling import Grammar, GrammarKind
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.grammar_trial import GrammarTrial, compiled_state
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import CapacityExceeded, InvalidRequest, Unavailable

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CACHED_GRAMMARS = 64
MAX_WAITING = 32

Compiled = LLMatcher | InvalidRequest
"""The state at the start of a grammar, which is shared and not to be advanced; or why there is none."""

# One line, so that a model can't fill its answer with blanks between two elements.
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarCompiler:
    """`vocab_size` counts the tokens that may be sampled; `eos_ids` are the model's end tokens."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._made: tuple[LLTokenizer, GrammarTrial] | None = None

    def prepare(self, grammar: Grammar) -> Future[Compiled]:
        """Compile `grammar`, unless that is done or under way; from any thread.

        Raises CapacityExceeded when too many others wait for that, and Unavailable after `close`.
        """
        with self._lock:
            if grammar not in self._cache:
                self._make_room()
                try:
                    self._cache[grammar] = self._thread.submit(self._compile, grammar)
                except RuntimeError:  # the thread has ended
                    raise Unavailable("The worker is shutting down: send the request again.") from None
            self._cache.move_to_end(grammar)
            return self._cache[grammar]

    def matcher(self, compiled: Compiled, stop_ids: Set[int] = frozenset()) -> GrammarMatcher:
        """A matcher for one request, which the model's end tokens and `stop_ids` end. Raises a refusal."""
        if isinstance(compiled, InvalidRequest):
            raise copy(compiled)  # what is raised collects a traceback, and this one is kept
        return GrammarMatcher(compiled.deep_copy(), self._vocab_size, self._eos_ids[0], {*self._eos_ids, *stop_ids})

    def close(self) -> None:
        """End the thread and the trial's process."""
        self._thread.shutdown(cancel_futures=True)
        if self._made is not None:
            self._made[1].close()

    # ------------------------------------------------------------ inside

    def _make_room(self) -> None:
        finished = [grammar for grammar, future in self._cache.items() if future.done()]
        if len(self._cache) - len(finished) >= MAX_WAITING:
            raise CapacityExceeded(f"The worker has {MAX_WAITING} forms to compile: try again in a second.")
        if len(self._cache) >= CACHED_GRAMMARS:
            del self._cache[finished[0]]

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            return self._attempt(grammar)
        except ValueError as error:
            return _refusal(grammar, str(error))
        except Exception:  # a defect, such as a process that doesn't start, is no property of the grammar
            with self._lock:
                self._cache.pop(grammar, None)
            raise

    def _attempt(self, grammar: Grammar) -> Compiled:
        if self._tokenizer is None or not self._eos_ids:
            lack = "a tokenizer" if self._tokenizer is None else "an end token"
            return InvalidRequest("structured_output", "set", f"unset for a model without {lack}", "ask for plain text")
        tokenizer, trial = self._made = self._made or self._make(self._tokenizer)
        source = _source(grammar)
        error = trial.error_of(source)
        return compiled_state(tokenizer, source) if error is None else _refusal(grammar, error)

    def _make(self, tokenizer: Tokenizer) -> tuple[LLTokenizer, GrammarTrial]:
        text = tokenizer.backend.to_str()
        return LLTokenizer(text, eos_token=[self._eos_ids[0]]), GrammarTrial(text, self._eos_ids[0])


def _source(grammar: Grammar) -> str:
    """llguidance's JSON form. Raises ValueError for a schema that isn't a JSON object."""
    match grammar.kind:
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.EBNF:
            return LLMatcher.grammar_from_lark(grammar.text)
    schema = '{"type": "object"}' if grammar.kind is GrammarKind.JSON_OBJECT else grammar.text
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_STYLE)


def _refusal(grammar: Grammar, error: str) -> InvalidRequest:
    lines = [line.strip() for line in error.splitlines() if line.strip()] or ["unknown error"]
    # A regular expression's complaint comes last, below the place that it points at.
    reason = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0])
    return InvalidRequest(
        f"structured_output.{grammar.kind}",
        grammar.text,
        f"a form that can be enforced ({reason[:200].rstrip('.')})",
        "correct or simplify it",
    )
