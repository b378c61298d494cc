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

    @property
    def is_chain(self) -> bool:
        """Whether each draft follows the one before it; no drafts are a chain."""
        return all(parent == (node - 1 if node else None) for node, parent in enumerate(self.parents))

    @property
    def depths(self) -> tuple[int, ...]:
        """Of each node: how many tokens it lies beyond the last known one, 1 or more."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent is None else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """The most drafts that can be accepted together."""
        return max(self.depths, default=0)

    def path(self, node: int | None) -> tuple[int, ...]:
        """The nodes from the last known token to `node`, which is included; none if it is None."""
        path: list[int] = []
        while node is not None:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def within(self, depth: int) -> Drafts:
        """The nodes at most so deep."""
        return self.only([each <= depth for each in self.depths])

    def only(self, kept: Sequence[bool]) -> Drafts:
        """The nodes that are kept, as far as all of their ancestors are."""
        places: dict[int | None, int | None] = {None: None}
        for node, parent in enumerate(self.parents):
            if kept[node] and parent in places:
                places[node] = len(places) - 1
        if len(places) > len(self.tokens):
            return self
        nodes = [node for node in places if node is not None]
        return Drafts(tuple(self.tokens[node] for node in nodes), tuple(places[self.parents[node]] for node in nodes))

    def first(self, count: int) -> Drafts:
        """The first `count` nodes; none if `count` isn't positive."""
        if count >= len(self.tokens):
            return self
        return Drafts(self.tokens[: max(0, count)], self.parents[: max(0, count)])


NO_DRAFTS = Drafts()
