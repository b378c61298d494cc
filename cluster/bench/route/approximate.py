"""Policies that guess what workers hold from what they sent them: SGLang's and smg's cache_aware, Ray Serve's affinity.

Both keep a trie of prompts; here its unit is the block, where theirs is the character. Thresholds are their
documented defaults. Nothing is evicted from the trie: Ray Serve's default, and smg's in effect, as its limit is far
beyond these runs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from cluster.bench.route.balancing import Outstanding
from cluster.bench.route.request import SimRequest

CACHE_THRESHOLD, BALANCE_ABS, BALANCE_REL = 0.3, 64, 1.5
"""smg: share of the prompt that must match; imbalance, in requests and as a ratio, beyond which the shortest queue
wins."""
MATCH_RATE = 0.1
"""Ray Serve: share of the prompt that must match. Its imbalance threshold is infinite by default."""


class SentPrefixes:
    """Which workers were sent a prompt that begins with a chain of blocks, and how many blocks each was sent in all."""

    def __init__(self, workers: int) -> None:
        self.sizes = [0] * workers
        self._sent: dict[int, set[int]] = {}

    def match(self, prompt: Sequence[int]) -> tuple[int, set[int]]:
        """How many leading blocks were sent to anyone, and who was sent the last of them."""
        depth, holders = 0, set[int]()
        for block in prompt:
            sent = self._sent.get(block)
            if sent is None:
                break
            depth, holders = depth + 1, sent
        return depth, holders

    def note(self, prompt: Sequence[int], worker: int) -> None:
        for block in prompt:
            sent = self._sent.setdefault(block, set())
            if worker not in sent:
                sent.add(worker)
                self.sizes[worker] += 1


class _Approximate(Outstanding):
    def __init__(self, workers: int, rng: random.Random) -> None:
        super().__init__(workers, rng)
        self._prefixes = SentPrefixes(workers)

    def place(self, request: SimRequest, now: float) -> int:
        worker = self._choose(request)
        self.load[worker] += 1
        self._prefixes.note(request.prompt, worker)
        return worker

    def _choose(self, request: SimRequest) -> int:
        raise TypeError("only a subclass chooses")

    def _smallest(self) -> list[int]:
        """The workers that were sent the least."""
        least = min(self._prefixes.sizes)
        return [worker for worker, size in enumerate(self._prefixes.sizes) if size == least]


class CacheAware(_Approximate):
    """When the cluster is out of balance, the shortest queue; else whoever was sent most of the prompt, if that is
    more than the threshold; else the worker that was sent least."""

    def _choose(self, request: SimRequest) -> int:
        most, fewest = max(self.load), min(self.load)
        if most - fewest > BALANCE_ABS and most > BALANCE_REL * fewest:
            return self.least()
        depth, holders = self._prefixes.match(request.prompt)
        if holders and depth > CACHE_THRESHOLD * len(request.prompt):
            return self.rng.choice(sorted(holders))
        return self.rng.choice(self._smallest())


class PrefixAffinity(_Approximate):
    """Candidates are those that were sent most of the prompt, or, if that is too little, those that were sent least;
    of two of them, the one with fewer requests."""

    def _choose(self, request: SimRequest) -> int:
        depth, holders = self._prefixes.match(request.prompt)
        matched = holders and depth >= MATCH_RATE * len(request.prompt)
        candidates = sorted(holders) if matched else self._smallest()
        two = self.rng.sample(candidates, min(2, len(candidates)))
        return min(two, key=self.load.__getitem__)
