"""Load that was placed on a worker but is not yet in its heartbeats.

Without it, every request of a burst would see the same idle worker. Invariant: a reservation lives from the decision
until the worker's heartbeat names the request, or until `ttl_s` has passed (the request never arrived). Owned by
`cluster.routing.router`.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Reserved:
    prefill_tokens: int
    expires_at: float


class Reservations:
    """The reservations on one worker."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._reserved: dict[str, _Reserved] = {}
        self.prefill_tokens = 0

    def __len__(self) -> int:
        return len(self._reserved)

    def add(self, request_id: str, prefill_tokens: int, now: float) -> None:
        self.settle((request_id,))
        self._reserved[request_id] = _Reserved(prefill_tokens, now + self._ttl_s)
        self.prefill_tokens += prefill_tokens

    def settle(self, request_ids: Iterable[str]) -> None:
        """These requests are in the worker's own figures now, or will never be."""
        for request_id in request_ids:
            reserved = self._reserved.pop(request_id, None)
            if reserved is not None:
                self.prefill_tokens -= reserved.prefill_tokens

    def expire(self, now: float) -> None:
        # Equal lifetimes: the oldest stand first, and one of them that is still valid ends the search.
        while self._reserved:
            request_id, reserved = next(iter(self._reserved.items()))
            if reserved.expires_at > now:
                return
            self.settle((request_id,))
