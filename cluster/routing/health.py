"""Which workers are believed alive: leases renewed by heartbeats, on the monotonic clock of one process.

Invariant: only heartbeats of the registered epoch renew a lease; a worker without a valid lease is never a candidate.
The clock is passed in, so a jump of the wall clock expires nothing. Owned by `cluster.routing.router`.
"""

from dataclasses import dataclass
from enum import StrEnum


class HealthState(StrEnum):
    LIVE = "live"
    SUSPECT = "suspect"
    """Somebody failed to reach it; not a candidate until its next heartbeat but one."""
    DEAD = "dead"


@dataclass(slots=True)
class _Lease:
    epoch: int
    renewed_at: float
    doubts: int = 0


class Leases:
    """Leases by worker id. Times are seconds on a monotonic clock."""

    def __init__(self, lease_s: float) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s is {lease_s}, but must be positive")
        self.lease_s = lease_s
        self._leases: dict[str, _Lease] = {}
        self.version = 0
        """Changes whenever a worker may have come to life, or ceased to be, other than by time."""

    def grant(self, worker_id: str, epoch: int, now: float) -> None:
        self.version += 1
        self._leases[worker_id] = _Lease(epoch, now)

    def renew(self, worker_id: str, epoch: int, now: float) -> bool:
        """Returns whether that life of the worker holds a lease: False tells it to register again."""
        lease = self._leases.get(worker_id)
        if lease is None or lease.epoch != epoch:
            return False
        if lease.doubts or now - lease.renewed_at > self.lease_s:
            self.version += 1
        lease.renewed_at = now
        lease.doubts = max(0, lease.doubts - 1)
        return True

    def suspect(self, worker_id: str, epoch: int) -> bool:
        """Doubts a worker until two heartbeats came: the first may have been under way when it died."""
        lease = self._leases.get(worker_id)
        if lease is None or lease.epoch != epoch:
            return False
        self.version += 1
        lease.doubts = 2
        return True

    def revoke(self, worker_id: str) -> None:
        self.version += 1
        self._leases.pop(worker_id, None)

    def state(self, worker_id: str, now: float) -> HealthState:
        lease = self._leases.get(worker_id)
        if lease is None or now - lease.renewed_at > self.lease_s:
            return HealthState.DEAD
        return HealthState.SUSPECT if lease.doubts else HealthState.LIVE

    def live(self, now: float) -> set[str]:
        """The workers that may be given requests."""
        oldest = now - self.lease_s
        return {
            worker_id for worker_id, lease in self._leases.items() if lease.renewed_at >= oldest and not lease.doubts
        }

    def first_end(self, now: float) -> float:
        """When the first of the leases that are valid now ends unless it is renewed; infinite if there is none."""
        renewed = (lease.renewed_at for lease in self._leases.values() if now - lease.renewed_at <= self.lease_s)
        return min(renewed, default=float("inf")) + self.lease_s

    def age(self, worker_id: str, now: float) -> float:
        """Seconds since the last heartbeat; infinite if there is no lease."""
        lease = self._leases.get(worker_id)
        return float("inf") if lease is None else now - lease.renewed_at

    def expired(self, now: float) -> list[str]:
        """Workers whose lease ran out."""
        return [worker_id for worker_id, lease in self._leases.items() if now - lease.renewed_at > self.lease_s]
