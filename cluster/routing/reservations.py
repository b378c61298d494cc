"""What was placed on a worker and doesn't decode there yet: reserved until its heartbeats know it, then waiting, then
in prefill.

Without it, every request of a burst would see the same idle worker. And a worker counts a waiting prompt in full,
since it hasn't claimed anything for it; here its share is what it is expected to lack.

Invariants: a reservation lives from the decision until the worker's heartbeat names the request, or until `ttl_s` has
passed (the request never arrived); a named request waits until the worker says that fewer do, and is in prefill until
the tokens that the worker has yet to compute are all those of younger ones. Owned by `cluster.routing.worker_state`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from cluster.routing.policy import CostModel


class Work(NamedTuple):
    """What a request brings to its worker."""

    tokens: int
    """Of the whole prompt."""
    lacking: int
    """Tokens of it that the worker is expected to compute and store."""
    prefill_ms: float


class _Sum:
    """The work of several requests."""

    __slots__ = ("lacking", "prefill_ms", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.lacking = 0
        self.prefill_ms = 0.0

    def add(self, work: Work, sign: int = 1) -> None:
        self.tokens += sign * work.tokens
        self.lacking += sign * work.lacking
        self.prefill_ms += sign * work.prefill_ms


class Reservations:
    """The reservations on one worker, and its queue as far as it was placed from here."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._reserved: dict[str, tuple[Work, float]] = {}
        self._queue: deque[Work] = deque()
        self._prefilling: deque[Work] = deque()
        self.reserved = _Sum()
        """Placed, and not in the worker's own figures."""
        self.waiting = _Sum()
        """In the worker's figures, and not running."""

    def __len__(self) -> int:
        return len(self._reserved)

    def add(self, request_id: str, work: Work, now: float) -> None:
        self.cancel(request_id)
        self._reserved[request_id] = work, now + self._ttl_s
        self.reserved.add(work)

    def cancel(self, request_id: str) -> Work | None:
        """Ends a reservation, if there is one."""
        entry = self._reserved.pop(request_id, None)
        if entry is None:
            return None
        self.reserved.add(entry[0], -1)
        return entry[0]

    def confirm(self, started: Iterable[str], waiting: int) -> None:
        """A heartbeat: these requests are in the worker's figures now, which count so many as waiting."""
        for request_id in started:
            work = self.cancel(request_id)
            if work is not None:
                self._queue.append(work)
                self.waiting.add(work)
        while len(self._queue) > waiting:
            work = self._queue.popleft()
            self.waiting.add(work, -1)
            self._prefilling.append(work)

    def prefilling_ms(self, tokens: int, costs: CostModel) -> float:
        """What is left of the prefill under way, by the worker's figure of `tokens` to compute, waiting prompts
        included."""
        left, ms, count = max(0, tokens - self.waiting.tokens), 0.0, 0
        for work in reversed(self._prefilling):
            if left <= 0:
                break
            part = min(left, work.lacking)
            ms += costs.target_ms(work.tokens - part, part)
            left -= part
            count += 1
        while len(self._prefilling) > count:
            self._prefilling.popleft()
        return ms + costs.target_ms(0, left)

    def expire(self, now: float) -> None:
        # Equal lifetimes: the oldest stand first, and one of them that is still valid ends the search.
        while self._reserved:
            request_id, (_, expires_at) = next(iter(self._reserved.items()))
            if expires_at > now:
                return
            self.cancel(request_id)
