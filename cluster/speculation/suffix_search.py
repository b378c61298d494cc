"""What followed wherever a text's last tokens stood before, as a chain of the likeliest tokens (Oliaro et al. 2024).

A suffix tree gives for every suffix the tokens that followed it, with their frequencies. Here the same numbers are
counted when they are asked for: token ids lie in one array, and the places where a suffix stood are those of the suffix
one token shorter, filtered. Nothing but the tokens is stored. Invariant: a guess is a function of the tokens alone; of
equally frequent tokens the one seen last wins. Called by the suffix drafter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]

_BOUNDARY = -1
"""Stands between two texts; no token has this id."""
# Of a suffix that stood at more places, the last ones are counted.
_MOST_COUNTED = 1024
# For factors such as 0.1, whose multiples fall just short of a whole number.
_ROUNDING = 1e-6


class TokenStream:
    """Texts one after the other in one array that grows at the end and is discarded from the front.

    Offsets count from the first token that ever was in it, so they hold for as long as their token is there.
    """

    def __init__(self) -> None:
        self._buffer: TokenArray = np.empty(64, np.int32)
        self._length = 0
        self._discarded = 0

    @property
    def tokens(self) -> TokenArray:
        """What it holds now; valid until it is changed."""
        return self._buffer[: self._length]

    @property
    def end(self) -> int:
        """Offset of the token that comes next."""
        return self._discarded + self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens to the last text."""
        grown = self._length + len(tokens)
        if grown > len(self._buffer):
            self._buffer = np.concatenate([self.tokens, np.empty(grown, np.int32)])
        self._buffer[self._length : grown] = tokens
        self._length = grown

    def close(self) -> None:
        """End the last text; what comes next is another."""
        self.extend((_BOUNDARY,))

    def text(self, start: int, end: int) -> TokenArray:
        """The tokens at offsets [start, end)."""
        return self.tokens[start - self._discarded : end - self._discarded]

    def blank(self, start: int, end: int) -> None:
        """Make the text at offsets [start, end) one that matches nothing."""
        self.text(start, end)[:] = _BOUNDARY

    def discard(self, end: int) -> None:
        """Forget all before offset `end`."""
        kept = self.text(end, self.end).copy()
        self._buffer[: len(kept)] = kept
        self._discarded, self._length = end, len(kept)


@dataclass(frozen=True, slots=True)
class Guess:
    """`score`: how many of the tokens are expected to be right."""

    tokens: tuple[int, ...] = ()
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """At most `depth` - 1 tokens are matched. A match of m tokens allows `factor` * m drafts, while their probability
    as a chain, estimated from frequencies, is at least `least_probability`."""

    depth: int
    factor: float
    least_probability: float

    def guess(self, tokens: TokenArray, context: Sequence[int], k: int) -> Guess:
        """The best chain of at most `k` tokens to follow `context`, by what followed its suffixes in `tokens`.

        If `context` is the end of `tokens`, it isn't matched with itself. Of equal scores that of the longest suffix
        is taken.
        """
        matches = self._matches(tokens, context)
        best, before = Guess(), 0
        for length in range(len(matches), 0, -1):
            places = matches[length - 1]
            limit = min(k, int(length * self.factor + _ROUNDING))
            # No more can be expected than is drafted; and a longer match at the same places allows more.
            if limit <= best.score or len(places) == before:
                continue
            before = len(places)
            found = self._follow(tokens, places[-_MOST_COUNTED:], limit)
            if found.score > best.score:
                best = found
        return best

    def _matches(self, tokens: TokenArray, context: Sequence[int]) -> list[Places]:
        """At [m - 1]: the places where a token follows the last m tokens of `context`; oldest first, while any are."""
        matches: list[Places] = []
        longest = min(self.depth - 1, len(context))
        if longest > 0 and len(tokens):
            places = np.flatnonzero(tokens[:-1] == context[-1]) + 1
            while len(places):
                matches.append(places)
                length = len(matches) + 1
                if length > longest:
                    break
                places = places[places >= length]
                places = places[tokens[places - length] == context[-length]]
        return matches

    def _follow(self, tokens: TokenArray, places: Places, limit: int) -> Guess:
        """The most frequent token at `places`, then that where it stood, and so on."""
        chosen: list[int] = []
        probability, score = 1.0, 0.0
        here = 1  # the context's own place counts, since there something else may follow
        while len(chosen) < limit:
            within = places[places < len(tokens)]
            followers = tokens[within]
            counts = Counter(followers[followers != _BOUNDARY][::-1].tolist())
            if not counts:
                break
            token = max(counts, key=counts.__getitem__)
            probability *= counts[token] / (len(places) + here)
            if probability < self.least_probability:
                break
            chosen.append(token)
            score += probability
            places, here = within[followers == token] + 1, 0
        return Guess(tuple(chosen), score)
