"""Stop strings over text that arrives in pieces.

Invariant: what `feed` and `flush` return, joined, is the text up to the earliest end of a stop string, without it,
however the text was cut into pieces. Text that may still turn out to begin a stop string is held back. Pure; one
matcher belongs to one request, and the engine calls it."""

from collections.abc import Sequence


class StopMatcher:
    """Watches a growing text for `stops`. Where several match, the one that is complete first ends the text; among
    those that are complete at the same character, the longest is cut off."""

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("stop strings must not be empty: leave out the empty one")
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Adds text; returns what is safe to emit now, and whether a stop string has been seen. Ignored after a
        match."""
        if self.matched or not self._stops:
            return ("" if self.matched else text), self.matched
        text = self._held + text
        start = self._find(text)
        if start is not None:
            self.matched, self._held = True, ""
            return text[:start], True
        keep = len(text) - self._possible(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> int | None:
        """Where the text is to be cut: the start of the stop string that is complete first."""
        hits = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(hits)[1] if hits else None

    def _possible(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stops)) - 1
        return next(
            (
                size
                for size in range(min(longest, len(text)), 0, -1)
                if any(stop.startswith(text[-size:]) for stop in self._stops)
            ),
            0,
        )
