"""What the output of one request may go on with, by its grammar.

Owns the state of a grammar along the committed tokens and along any drafts after them. Invariant: `allowed(drafts)` is
a function of the grammar, the committed tokens and `drafts`; a state never goes back, for each draft has a copy of its
parent's. So a token is chosen among the same ones whether it was drafted or decoded plainly, and the output with
speculation is that without. Stop tokens are allowed exactly where the output is complete. One per request, beside its
`RequestOutput`; used by the step loop and by drafters, on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from cluster.core.drafts import Drafts

Allowed = npt.NDArray[np.bool_]


class GrammarMatcher:
    """`state` is at the start of the grammar and not shared with others. `end_id` is the end token that the state
    knows; `stop_ids` are all the tokens that end this request."""

    def __init__(self, state: LLMatcher, vocab_size: int, end_id: int, stop_ids: Set[int]) -> None:
        self._vocab_size = vocab_size
        self._end_id = end_id
        self._stop_ids = frozenset(stop_ids)
        self._stops = np.array(sorted(each for each in stop_ids if each < vocab_size), np.int64)
        self._states: dict[tuple[int, ...], LLMatcher | None] = {(): state}
        self._allowed: dict[tuple[int, ...], Allowed] = {}

    @property
    def stuck(self) -> bool:
        """Whether nothing can follow the committed tokens: going on would take more than one step may."""
        return not self.allowed().any()

    def accept(self, token: int) -> None:
        """Commit a token that is allowed."""
        self._states = {(): self._state((token,))}
        self._allowed = {}

    def allowed(self, drafts: Sequence[int] = ()) -> Allowed:
        """Which tokens [V] may follow the committed ones and `drafts`; none where these leave the grammar."""
        path = tuple(drafts)
        if path not in self._allowed:
            self._allowed[path] = self._mask(self._state(path))
        return self._allowed[path]

    def fitting(self, drafts: Drafts) -> Drafts:
        """The drafts without those that the grammar rules out, and without any after the end."""
        kept: list[bool] = []
        for node, token in enumerate(drafts.tokens):
            before = [drafts.tokens[each] for each in drafts.path(drafts.parents[node])]
            fits = 0 <= token < self._vocab_size and bool(self.allowed(before)[token])
            kept.append(fits and token not in self._stop_ids and bool(self.allowed([*before, token]).any()))
        return drafts.only(kept)

    def _state(self, path: tuple[int, ...]) -> LLMatcher | None:
        """The state after `path`; None outside of the grammar and after the end."""
        if path not in self._states:
            before = self._state(path[:-1])
            self._states[path] = None if before is None or path[-1] in self._stop_ids else _after(before, path[-1])
        return self._states[path]

    def _mask(self, state: LLMatcher | None) -> Allowed:
        words = b"" if state is None else state.compute_bitmask()
        if state is None or state.is_error():  # an error here is a limit on the work of one step
            return np.zeros(self._vocab_size, np.bool_)
        bits = np.unpackbits(np.frombuffer(words, np.uint8), bitorder="little").view(np.bool_)
        allowed = bits[: self._vocab_size]
        allowed[self._stops] = bits[self._end_id]
        return allowed


def _after(state: LLMatcher, token: int) -> LLMatcher | None:
    # Copies make the siblings of a tree independent, and leave nothing to restore: `rollback` of llguidance 1.9 does
    # that imperfectly once the end token was taken.
    following = state.deep_copy()
    return following if following.consume_token(token) else None
