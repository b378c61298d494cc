"""Drafts by prompt lookup: what followed the last occurrence of the longest matching suffix (Saxena 2023).

Keeps an index per request from n-grams to where they last ended. Invariant: the index is a function of all known
tokens, reused ones included, and never of how they were computed; it grows by what is new. No model, no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cluster.core.batch_plan import DraftShape
from cluster.core.drafts import NO_DRAFTS, Drafts
from cluster.engine.kv_tensors import KvLayout, KvTensors
from cluster.speculation.lookahead import SpeculationMethod, coupling_of, draft_kv_lookahead
from cluster.speculation.protocol import DraftTask, LayerKeysValues
from cluster.speculation.source import DraftSource


@dataclass(slots=True)
class SuffixIndex:
    """Where each n-gram of one token sequence last ended, for n in [least, most]."""

    least: int
    most: int
    _ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    _indexed: int = 0

    def continuation(self, tokens: Sequence[int], k: int) -> tuple[int, ...]:
        """Up to `k` tokens that followed the latest earlier occurrence of the longest suffix of `tokens` that has one.

        `tokens` must extend what the index was last asked about.
        """
        # The suffix itself must not match, so only n-grams that end before the last token are indexed.
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(self.least, min(self.most, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for n in range(min(self.most, len(tokens) - 1), self.least - 1, -1):
            earlier = self._ends.get(tuple(tokens[len(tokens) - n :]))
            if earlier is not None:
                return tuple(tokens[earlier : earlier + k])
        return ()


def build_ngram(source: DraftSource) -> NgramDrafter:
    """A drafter by prompt lookup, as configured."""
    return NgramDrafter(source.max_drafts, source.config.ngram_min, source.config.ngram_max)


class NgramDrafter:
    """`least` and `most` bound the length of the suffix that is looked up; `max_drafts` is K."""

    method = SpeculationMethod.NGRAM
    kv_layout: KvLayout | None = None
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, max_drafts: int, least: int, most: int) -> None:
        self.shape = DraftShape(coupling_of(self.method), draft_kv_lookahead(self.method), max_drafts, None)
        self._least, self._most = least, most
        self._indexes: dict[str, SuffixIndex] = {}

    def attach(self, kv: KvTensors) -> None:
        raise TypeError("prompt lookup has no KV")

    def propose(self, tasks: Sequence[DraftTask]) -> list[Drafts]:
        return [self._look_up(task) if task.k > 0 else NO_DRAFTS for task in tasks]

    def _look_up(self, task: DraftTask) -> Drafts:
        index = self._indexes.get(task.request_id)
        if index is None:
            index = self._indexes[task.request_id] = SuffixIndex(self._least, self._most)
        return Drafts.chain(index.continuation(task.tokens, task.k))

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def recompute(self, tokens: Sequence[int], hidden: Tensor | None) -> list[LayerKeysValues]:
        return []
