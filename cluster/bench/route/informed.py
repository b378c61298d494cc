"""Policies that hear from workers which blocks their target pools hold: Dynamo's cost and llm-d's weighted scorers.

Weights are their documented defaults. Neither tracks draft KV. Created by `policies`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from cluster.bench.route.balancing import Outstanding
from cluster.bench.route.policy import News
from cluster.bench.route.request import SimRequest

PREFIX_WEIGHT, QUEUE_WEIGHT, MEMORY_WEIGHT = 3.0, 2.0, 2.0
"""llm-d: prefix, queue and KV memory scorers, as its guide for precise prefix routing sets them."""
SPECULATIVE_S = 2.0
"""llm-d: a prompt just sent counts as held for so long."""


class Holders:
    """Which workers hold which block, one bit each."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def set(self, worker: int, block: int, held: bool) -> None:
        mask = self._masks.get(block, 0)
        mask = mask | 1 << worker if held else mask & ~(1 << worker)
        if mask:
            self._masks[block] = mask
        else:
            self._masks.pop(block, None)

    def mask(self, block: int) -> int:
        return self._masks.get(block, 0)

    def depths(self, prompt: Sequence[int], workers: int, also: Holders | None = None) -> list[int]:
        """Leading blocks of the prompt that each worker holds, here or in `also`."""
        depths = [0] * workers
        alive = (1 << workers) - 1
        for depth, block in enumerate(prompt, 1):
            alive &= self.mask(block) | (also.mask(block) if also else 0)
            if not alive:
                break
            left = alive
            while left:
                worker = left.bit_length() - 1
                depths[worker] = depth
                left ^= 1 << worker
        return depths


class _Informed(Outstanding):
    def __init__(self, workers: int, rng: random.Random) -> None:
        super().__init__(workers, rng)
        self.holders = Holders()

    @property
    def wants_news(self) -> bool:
        return True

    def news(self, worker: int, news: News, now: float) -> None:
        for block, target, _ in news.blocks:
            self.holders.set(worker, block, target)

    def best(self, costs: Sequence[float]) -> int:
        """One of the cheapest workers, at random."""
        cheapest = min(costs)
        return self.rng.choice([worker for worker, cost in enumerate(costs) if cost == cheapest])


class DynamoCost(_Informed):
    """Prefill blocks that would wait on the worker, this request's included, plus the distinct blocks that would be
    active.

    The router books both itself: prefill from placement to first token, active blocks from placement to the end."""

    def __init__(self, workers: int, rng: random.Random, block_size: int) -> None:
        super().__init__(workers, rng)
        self._block_size = block_size
        self._prefill = [0] * workers
        self._active = Holders()
        self._users: list[dict[int, int]] = [{} for _ in range(workers)]
        self._booked: dict[int, int] = {}

    def place(self, request: SimRequest, now: float) -> int:
        workers, blocks = len(self.load), len(request.prompt)
        held = self.holders.depths(request.prompt, workers)
        active = self._active.depths(request.prompt, workers)
        lacking = [request.prompt_tokens - depth * self._block_size for depth in held]
        costs = [
            (prefill + new) / self._block_size + len(users) + blocks - shared
            for prefill, new, users, shared in zip(self._prefill, lacking, self._users, active, strict=True)
        ]
        worker = self.best(costs)
        self._prefill[worker] += lacking[worker]
        self._booked[request.number] = lacking[worker]
        self._activate(worker, request.prompt)
        return worker

    def first_token(self, worker: int, request: SimRequest, now: float) -> None:
        self._prefill[worker] -= self._booked.pop(request.number)

    def ended(self, worker: int, request: SimRequest, now: float) -> None:
        users = self._users[worker]
        for block in request.prompt:
            users[block] -= 1
            if not users[block]:
                del users[block]
                self._active.set(worker, block, False)

    def _activate(self, worker: int, prompt: Sequence[int]) -> None:
        users = self._users[worker]
        for block in prompt:
            users[block] = users.get(block, 0) + 1
            self._active.set(worker, block, True)


class LlmdScorer(_Informed):
    """The highest weighted sum of three scores from 0 to 1: share of the prompt held, short queue, free KV memory."""

    def __init__(self, workers: int, rng: random.Random) -> None:
        super().__init__(workers, rng)
        self._waiting = [0] * workers
        self._used = [0.0] * workers
        self._guessed = Holders()
        self._guesses: dict[tuple[int, int], int] = {}
        self._expiring: deque[tuple[float, int, tuple[int, ...]]] = deque()

    def news(self, worker: int, news: News, now: float) -> None:
        super().news(worker, news, now)
        self._waiting[worker] = news.waiting
        self._used[worker] = news.in_use[0] / news.capacity

    def place(self, request: SimRequest, now: float) -> int:
        self._expire(now)
        depths = self.holders.depths(request.prompt, len(self.load), also=self._guessed)
        blocks = max(1, len(request.prompt))
        longest, shortest = max(self._waiting), min(self._waiting)
        spread = longest - shortest or 1
        costs = [
            -PREFIX_WEIGHT * depth / blocks
            - QUEUE_WEIGHT * (longest - waiting if longest > shortest else 1) / spread
            - MEMORY_WEIGHT * (1.0 - used)
            for depth, waiting, used in zip(depths, self._waiting, self._used, strict=True)
        ]
        worker = self.best(costs)
        self._guess(worker, request.prompt, now)
        return worker

    def _guess(self, worker: int, prompt: tuple[int, ...], now: float) -> None:
        for block in prompt:
            self._guesses[worker, block] = self._guesses.get((worker, block), 0) + 1
            self._guessed.set(worker, block, True)
        self._expiring.append((now + SPECULATIVE_S, worker, prompt))

    def _expire(self, now: float) -> None:
        while self._expiring and self._expiring[0][0] <= now:
            _, worker, prompt = self._expiring.popleft()
            for block in prompt:
                left = self._guesses.pop((worker, block)) - 1
                if left:
                    self._guesses[worker, block] = left
                else:
                    self._guessed.set(worker, block, False)
