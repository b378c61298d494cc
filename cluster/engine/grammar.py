"""Compiles the grammars of requests, for one model's tokenizer.

Compiling happens in a thread of its own, so that the engine's steps go on, and only after a trial in a process of its
own (`grammar_trial`). Invariant: a grammar is compiled once while it stays among the last ones used, and one that was
refused is refused again without another trial. `prepare` from any thread; `matcher` is what the engine calls, on its own
thread. One per engine.

Masks come from llguidance, which refuses a schema that it can't enforce, bounds the work of each mask and needs no other
package. xgrammar 0.2.9 was the alternative: it ignores such keywords, and its wheel brings Triton along.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from cluster.core.sampling import Grammar, GrammarKind
from cluster.engine.grammar_matcher import GrammarMatcher
from cluster.engine.grammar_trial import GrammarTrial, compiled
from cluster.engine.tokenizer import Tokenizer
from cluster.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

CACHED_GRAMMARS = 64

# One line, so that a model can't fill its answer with blanks between two elements.
_JSON_STYLE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarCompiler:
    """`vocab_size` counts the tokens that may be sampled; `eos_ids` are the model's end tokens."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._lock = threading.Lock()
        self._cache: OrderedDict[Grammar, LLMatcher | InvalidRequest] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._made: tuple[LLTokenizer, GrammarTrial] | None = None

    def prepare(self, grammar: Grammar) -> Future[LLMatcher]:
        """Compile `grammar`, so that `matcher` has it at hand. The result is shared, and not to be advanced.

        The future raises InvalidRequest where the grammar is wrong, says nothing, or takes too much to compile.
        """
        found = self._cached(grammar)
        if found is None:
            return self._thread.submit(self._compile, grammar)
        done: Future[LLMatcher] = Future()
        if isinstance(found, InvalidRequest):
            done.set_exception(found)
        else:
            done.set_result(found)
        return done

    def matcher(self, grammar: Grammar, stop_ids: Set[int] = frozenset()) -> GrammarMatcher:
        """A matcher for one request, which the model's end tokens and `stop_ids` end. Waits for `prepare`.

        Raises InvalidRequest as that does.
        """
        state = self.prepare(grammar).result()
        return GrammarMatcher(state.deep_copy(), self._vocab_size, self._eos_ids[0], {*self._eos_ids, *stop_ids})

    def close(self) -> None:
        """End the thread and the trial's process."""
        self._thread.shutdown(cancel_futures=True)
        if self._made is not None:
            self._made[1].close()

    # ------------------------------------------------------------ inside

    def _cached(self, grammar: Grammar) -> LLMatcher | InvalidRequest | None:
        with self._lock:
            if grammar in self._cache:
                self._cache.move_to_end(grammar)
            return self._cache.get(grammar)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        result = self._cached(grammar) or self._attempt(grammar)
        with self._lock:
            self._cache[grammar] = result
            if len(self._cache) > CACHED_GRAMMARS:
                self._cache.popitem(last=False)
        if isinstance(result, InvalidRequest):
            raise result
        return result

    def _attempt(self, grammar: Grammar) -> LLMatcher | InvalidRequest:
        if self._tokenizer is None or not self._eos_ids:
            lacking = "a tokenizer" if self._tokenizer is None else "an end token"
            return InvalidRequest(
                "structured_output", "set", f"unset for a model without {lacking}", "ask for plain text"
            )
        try:
            tokenizer, trial = self._made = self._made or self._make(self._tokenizer)
            source = _source(grammar)
            error = trial.error_of(source)
            return compiled(tokenizer, source) if error is None else _refusal(grammar, error)
        except ValueError as error:
            return _refusal(grammar, str(error))

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
