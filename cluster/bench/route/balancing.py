"""Policies that know nothing of prefixes: round robin, least loaded, power of two choices, consistent hashing.

Load is the number of requests placed and not ended. Created by `policies`.
"""

from __future__ import annotations

import random
from bisect import bisect
from hashlib import sha256

from cluster.bench.route.policy import Deaf
from cluster.bench.route.request import SimRequest

_RING_POINTS = 160
"""Points of each worker on the hash ring, as in ketama."""


class RoundRobin(Deaf):
    def __init__(self, workers: int, rng: random.Random) -> None:
        self._workers = workers
        self._next = rng.randrange(workers)

    def place(self, request: SimRequest, now: float) -> int:
        self._next = (self._next + 1) % self._workers
        return self._next


class Outstanding(Deaf):
    """Counts each worker's requests; a base for policies that balance by it."""

    def __init__(self, workers: int, rng: random.Random) -> None:
        self.load = [0] * workers
        self.rng = rng

    def least(self) -> int:
        """One of the workers with the fewest requests, at random."""
        fewest = min(self.load)
        return self.rng.choice([worker for worker, load in enumerate(self.load) if load == fewest])

    def ended(self, worker: int, request: SimRequest, now: float) -> None:
        self.load[worker] -= 1


class LeastLoaded(Outstanding):
    def place(self, request: SimRequest, now: float) -> int:
        worker = self.least()
        self.load[worker] += 1
        return worker


class PowerOfTwo(Outstanding):
    def place(self, request: SimRequest, now: float) -> int:
        two = self.rng.sample(range(len(self.load)), 2) if len(self.load) > 1 else [0]
        worker = min(two, key=self.load.__getitem__)
        self.load[worker] += 1
        return worker


class ConsistentHash(Deaf):
    """A ring of hashes; a session's requests all go to the first point behind its own hash. Blind to load."""

    def __init__(self, workers: int, rng: random.Random) -> None:
        salt = rng.randrange(2**32)
        ring = sorted(
            (_hash(salt, worker, point), worker) for worker in range(workers) for point in range(_RING_POINTS)
        )
        self._points = [point for point, _ in ring]
        self._owners = [worker for _, worker in ring]
        self._salt = salt

    def place(self, request: SimRequest, now: float) -> int:
        return self._owners[bisect(self._points, _hash(self._salt, -1, request.session)) % len(self._owners)]


def _hash(*parts: int) -> int:
    return int.from_bytes(sha256(repr(parts).encode()).digest()[:8], "big")
