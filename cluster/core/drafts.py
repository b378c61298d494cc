"""Drafted tokens that wait for verification: a chain, or a tree of alternatives.

Invariant: nodes are in topological order, so any first part of them is a tree again. Made by drafters, kept by a
request for one step, laid out by the step builder, judged by `cluster.speculation.verify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Drafts:
    """Node i proposes `tokens[i]` after node `parents[i]`, or after the last known token if that is None.

    Raises ValueError if a node comes before its parent, or if there are more of one than of the other.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} drafts have {len(self.parents)} parents")
        if any(parent is not None and not 0 <= parent < node for node, parent in enumerate(self.parents)):
            raise ValueError(f"parents are {self.parents}, but each must be a node before its child")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Drafts:
        """Each token after the one before it."""
        return cls(tuple(tokens), (None, *range(len(tokens) - 1)) if tokens else ())

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, count: int) -> Drafts:
        """The first `count` nodes; none if `count` isn't positive."""
        if count >= len(self.tokens):
            return self
        return Drafts(self.tokens[: max(0, count)], self.parents[: max(0, count)])


NO_DRAFTS = Drafts()
