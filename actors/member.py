"""One supervised process: an actor that first loads, then runs until it dies, and is started again.

Every actor of the project has the same two methods: `load()` prepares it and returns `Loaded`, or the `TandemError`
that stands in the way (as a value, for an exception would arrive wrapped in Ray's); `run()` ends only when the actor
does. Invariant: a member has at most one living actor, and exactly one pending call to it: `load` while LOADING,
`run` while RUNNING. Owned by `actors.supervisor`, on one thread at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError

from cluster.errors import TandemError, Unavailable
from cluster.observe.logging import event
from cluster.routing.types import WorkerInfo

logger = logging.getLogger(__name__)

_FIRST_WAIT_S = 0.2
_MAX_WAIT_S = 30.0
_STABLE_S = 60.0
"""After running this long, the next failure is treated as the first."""


class Phase(StrEnum):
    DOWN = "down"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a member says of itself when it is ready to run."""

    pid: int
    worker: WorkerInfo | None = None
    endpoint: str | None = None


class Member:
    def __init__(self, name: str, spawn: Callable[[], ActorHandle[Any]]) -> None:
        self.name = name
        self.phase = Phase.DOWN
        self.loaded: Loaded | None = None
        self.failure: TandemError | None = None
        """Why the last life ended."""
        self.restarts = 0
        self.pending: ray.ObjectRef[Any] | None = None
        self.retry_at = 0.0
        self._spawn = spawn
        self._handle: ActorHandle[Any] | None = None
        self._started_at = 0.0
        self._wait_s = _FIRST_WAIT_S

    @property
    def handle(self) -> ActorHandle[Any]:
        if self._handle is None:
            raise Unavailable(f"{self.name} is not running: try again in a few seconds.")
        return self._handle

    def launch(self) -> None:
        """Starts a new life."""
        self._started_at = time.monotonic()
        try:
            self._handle = self._spawn()
            self.pending = self._handle.load.remote()
        except (RayError, ValueError) as error:
            # Such as a name that its dead owner still holds.
            self._fall(Unavailable(f"{self.name} could not be started ({error}): it is tried again."))
            return
        self.phase = Phase.LOADING

    def advance(self) -> bool:
        """Takes the answer of the pending call; returns whether the member is still alive."""
        if self.pending is None:
            return self.phase is not Phase.DOWN
        try:
            answer = ray.get(self.pending)
        except RayActorError:
            answer = Unavailable(
                f"The process of {self.name} ended while {self.phase}: see the system's log for its cause."
            )
        except RayError as error:
            logger.exception(event("member_failed", member=self.name, phase=self.phase))
            answer = Unavailable(f"{self.name} failed while {self.phase} ({type(error).__name__}): see its log.")
        if not isinstance(answer, Loaded):
            self._fall(answer if isinstance(answer, TandemError) else None)
            return False
        self.loaded, self.phase, self.failure = answer, Phase.RUNNING, None
        self.pending = self.handle.run.remote()
        return True

    def end(self) -> None:
        """Kills the actor, if there is one."""
        if self._handle is not None:
            with suppress(RayError):
                ray.kill(self._handle)
        self._handle, self.pending, self.phase = None, None, Phase.DOWN

    def _fall(self, failure: TandemError | None) -> None:
        self.end()
        now = time.monotonic()
        self._wait_s = _FIRST_WAIT_S if now - self._started_at > _STABLE_S else min(2 * self._wait_s, _MAX_WAIT_S)
        self.failure, self.retry_at, self.restarts = failure, now + self._wait_s, self.restarts + 1
