"""Dynamic trees of drafts, by a head that is fed its own output (Li et al. 2024, EAGLE-2; kept by EAGLE-3).

A tree grows level by level. Every node has a score: the logarithm of the probability, as the draft sees it, that the
target's own tokens lead there. Of each level the `top_k` best nodes are expanded, all of them in one pass, in scratch
slots of which each sees its ancestors only; each brings `top_k` children. In the end the `total` best of all nodes are
proposed, best first. A child never scores above its parent, so every first part of them is a tree again, and the best
one of its size: a step that has room for fewer drafts just takes fewer.

Invariant: RoPE positions go by depth, scratch slots by order, so that a tree needs scratch slots for all that is
expanded, whatever is proposed. Called by `RecurrentDrafter` where trees are configured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import Drafts
from cluster.engine.batch import PagedRow, ancestor_mask
from cluster.engine.sampler import SampleRow
from cluster.speculation.chain import DraftChooser, checked, sample_row
from cluster.speculation.contenders import Contender
from cluster.speculation.protocol import DraftTask


@dataclass(frozen=True, slots=True)
class TreeShape:
    """`top_k` nodes of a level are expanded, into as many children each; at most `total` nodes are proposed."""

    top_k: int
    total: int

    def scratch(self, depth: int) -> int:
        """Draft slots that growing a tree so deep may write: its last level isn't fed."""
        return self.top_k * max(0, depth - 1)


class TreeModel(Protocol):
    """The passes of a model that drafts trees."""

    def begin(self, tasks: Sequence[DraftTask], drafting: Sequence[int]) -> Tensor:
        """Write every task's slots. Logits [R, V] after the last slot of the tasks at the places `drafting`."""

    def grow(self, rows: Sequence[PagedRow], parents: Sequence[int]) -> Tensor:
        """Feed a level of nodes, T in all. `parents` [T] are the places of their parents in the last pass's logits.

        Logits [T, V] after each node.
        """


@dataclass(slots=True)
class _Tree:
    """The tree of one task. `level` are the nodes whose children come next, None being the last known token, and
    `place` is where the last pass's logits have the first of them. `expanded` are nodes by scratch slot."""

    task: DraftTask
    shape: TreeShape
    tokens: list[int] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    level: list[int | None] = field(default_factory=lambda: [None])
    place: int = 0
    depth: int = 0
    expanded: list[int] = field(default_factory=list)

    def sample_rows(self) -> list[SampleRow]:
        """What the target will choose the token after each node of the level with."""
        return [sample_row(self.task, self._path(node)) for node in self.level]

    def _path(self, node: int | None) -> list[int]:
        tokens: list[int] = []
        while node is not None:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def branch(self, children: Sequence[Sequence[Contender]]) -> list[int]:
        """Take the children of each node of the level. Returns where the last pass has the parents of the next level;
        nowhere if there is none."""
        first, above, at = (
            len(self.tokens),
            self.level,
            {node: place for place, node in enumerate(self.level, self.place)},
        )
        for parent, found in zip(above, children, strict=True):
            for token, score in found:
                self.tokens.append(token)
                self.parents.append(parent)
                self.scores.append(score + (0.0 if parent is None else self.scores[parent]))
        self.depth += 1
        going = self._best(range(first, len(self.tokens)))[: self.shape.top_k] if self.depth < self.task.k else []
        self.level = list(going)
        self.expanded += going
        return [at[self.parents[node]] for node in going]

    def row(self) -> PagedRow:
        """The level as a row: in the scratch slots after those before it, at the position of its depth."""
        places: dict[int | None, int] = {node: place for place, node in enumerate(self.expanded)}
        mask = ancestor_mask([places.get(self.parents[node]) for node in self.expanded])
        count = len(self.level)
        start = self.task.end + len(self.expanded) - count
        positions = [self.task.end + len(self._path(node)) - 1 for node in self.expanded]
        tokens = [self.tokens[node] for node in self.expanded[-count:]]
        return PagedRow(tokens, start, self.task.block_table, 0, positions, mask[-count:])

    def drafts(self) -> Drafts:
        """The best nodes."""
        nodes = self._best(range(len(self.tokens)))[: self.shape.total]
        places: dict[int | None, int] = {node: place for place, node in enumerate(nodes)}
        return Drafts(
            tuple(self.tokens[node] for node in nodes), tuple(places.get(self.parents[node]) for node in nodes)
        )

    def _best(self, nodes: Sequence[int]) -> list[int]:
        """`nodes` by score; parents, which come first, before children that score the same."""
        return sorted(nodes, key=lambda node: -self.scores[node])


def draft_trees(
    tasks: Sequence[DraftTask], shape: DraftShape, tree: TreeShape, chooser: DraftChooser, model: TreeModel
) -> list[Drafts]:
    """The drafts of each task. Raises ValueError for a task that breaks its contract, before anything is written."""
    trees = [_Tree(checked(task, shape), tree) for task in tasks]
    writing = [each for each in trees if each.task.end > each.task.start]
    going = [each for each in writing if each.task.k]
    if writing:
        drafting = [place for place, each in enumerate(writing) if each.task.k]
        logits = model.begin([each.task for each in writing], drafting)
    for place, each in enumerate(going):
        each.place = place
    while going:
        found = chooser.contenders(logits, [row for each in going for row in each.sample_rows()], tree.top_k)
        parents: list[int] = []
        for each in going:
            first = each.place
            above = each.branch(found[first : first + len(each.level)])
            each.place = len(parents)
            parents += above
        going = [each for each in going if each.level]
        if going:
            logits = model.grow([each.row() for each in going], parents)
    return [each.drafts() for each in trees]
