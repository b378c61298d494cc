"""Text of a growing token sequence, piece by piece.

Invariant: the pieces given out, joined, are the text that the output adds to the prompt; no piece ends inside a code
point, and none holds text of the prompt. A state can be rebuilt from token ids alone (`resume`). Called by the engine
and, when a stream moves to another worker, by the gateway.
"""

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream

_INCOMPLETE = "\ufffd"
# Enough for a decoder to see what comes before a word, and more tokens than a code point has bytes.
_CONTEXT = 8
# No text holds this many tokens back; a model that emits invalid bytes without end must not cost quadratic time.
_LONGEST_HELD = 256


class IncrementalDetokenizer:
    """Feed it the output's ids as they come. One per request; not thread-safe."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        tail = list(prompt[-_CONTEXT:])
        # A stream seeded with an unfinished code point would give out its whole seed with the next token: seed it
        # with what comes before, and let the character appear when the output completes it.
        whole = len(tail)
        while whole and self._decode(tail[:whole]).endswith(_INCOMPLETE):
            whole -= 1
        self._context, self._pending = tail[:whole], tail[whole:]
        self._stream = DecodeStream(ids=tail[:whole], skip_special_tokens=skip_special_tokens)
        if self._pending:
            self._stream.step(tokenizer, self._pending)

    @classmethod
    def resume(
        cls,
        tokenizer: tokenizers.Tokenizer,
        prompt: Sequence[int],
        output: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> tuple["IncrementalDetokenizer", str]:
        """The state after `output`, and the text given out up to there."""
        detokenizer = cls(tokenizer, prompt, skip_special_tokens)
        return detokenizer, detokenizer.feed(output)

    def feed(self, ids: Sequence[int]) -> str:
        """The text that `ids` complete; empty while a code point is unfinished."""
        pieces = []
        for token in ids:
            self._pending.append(token)
            piece = self._stream.step(self._tokenizer, token)
            if piece:
                pieces.append(piece)
                self._context, self._pending = self._pending, []
            elif len(self._pending) >= _LONGEST_HELD:
                pieces.append(self.flush())
        return "".join(pieces)

    def flush(self) -> str:
        """What is still held back, with U+FFFD for bytes that make no code point. For the end of the output."""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        self._context, self._pending = [], []
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return text[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip)
