"""What a worker's pools hold, block by raw block, and how that changed since the cluster was last told.

`FrontierLedger` listens to the trees of the target and of the draft pool; `FrontierReporter` numbers what it has to
tell. Invariants: reported blocks come after their parents; nothing grows without bound if nobody asks: after too many
changes the answer is a snapshot. Owned by `PairedCache`; the reporter belongs to whoever sends the reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.core.frontier import BlockState, FrontierReport, TreeListener
from cluster.core.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class FrontierChanges:
    """`stored` blocks with their present state, parents first, and the keys `removed` from every pool. If `complete`,
    this is all that is held, not what changed."""

    stored: tuple[BlockState, ...]
    removed: tuple[bytes, ...]
    complete: bool


class _Changed:
    """The raw blocks that were published or evicted in any pool: key -> parent and depth."""

    def __init__(self, limit: int) -> None:
        self.places: dict[bytes, tuple[bytes | None, int]] = {}
        self.overflowed = False
        self._limit = limit

    def note(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        for name in names:
            self.places[name] = parent, depth
            parent = name
            depth += 1
        if len(self.places) > self._limit:
            self.clear()
            self.overflowed = True

    def clear(self) -> None:
        self.places.clear()
        self.overflowed = False


class _PoolLedger(TreeListener):
    """The raw blocks that one pool holds. A draft pool may hold one several times, with different successors."""

    def __init__(self, changed: _Changed) -> None:
        self.held: set[bytes] = set()
        self._again: Counter[bytes] = Counter()
        self._changed = changed

    def stored(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        self._again.update(self.held.intersection(names))
        self.held.update(names)
        self._changed.note(names, parent, depth)

    def removed(self, names: Sequence[bytes], parent: bytes | None, depth: int) -> None:
        repeated = [name for name in names if name in self._again] if self._again else []
        self.held.difference_update(names)
        self.held.update(repeated)
        self._again -= Counter(repeated)
        self._changed.note(names, parent, depth)


class FrontierLedger:
    """`limit` is the number of changed blocks beyond which everything is told anew instead."""

    def __init__(self, limit: int) -> None:
        self._changed = _Changed(limit)
        self.target = _PoolLedger(self._changed)
        self.draft = _PoolLedger(self._changed)

    def changes(self, trees: Sequence[PrefixTree]) -> FrontierChanges:
        """What changed since the last call. `trees` are those that this ledger listens to."""
        if self._changed.overflowed:
            return self.everything(trees)
        states = [self._state(key, parent, depth) for key, (parent, depth) in self._changed.places.items()]
        self._changed.clear()
        stored = sorted((each for each in states if each.target or each.draft), key=_depth)
        removed = tuple(each.key for each in states if not each.target and not each.draft)
        return FrontierChanges(tuple(stored), removed, complete=False)

    def everything(self, trees: Sequence[PrefixTree]) -> FrontierChanges:
        """All that is held now; earlier changes needn't be told any more."""
        self._changed.clear()
        states: dict[bytes, BlockState] = {}
        for tree in trees:
            for names, parent, depth in tree.named_chains():
                for index, name in enumerate(names):
                    states[name] = self._state(name, names[index - 1] if index else parent, depth + index)
        return FrontierChanges(tuple(sorted(states.values(), key=_depth)), (), complete=True)

    def _state(self, key: bytes, parent: bytes | None, depth: int) -> BlockState:
        return BlockState(key, parent, depth, key in self.target.held, key in self.draft.held)


def _depth(state: BlockState) -> int:
    return state.depth


class FrontierReporter:
    """Numbers the reports of one life of a worker, from 1 on."""

    def __init__(self, worker: str, epoch: int) -> None:
        self._worker = worker
        self._epoch = epoch
        self.seq = 0
        """Number of the last report made."""

    def report(self, changes: FrontierChanges) -> FrontierReport | None:
        """The next report, or None if there is nothing to tell."""
        if not (changes.stored or changes.removed or changes.complete):
            return None
        self.seq += 1
        return FrontierReport(self._worker, self._epoch, self.seq, changes.stored, changes.removed, changes.complete)
