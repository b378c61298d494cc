"""Creates the cluster's actors, watches them, and starts those again that died.

Invariant: after `start`, every member is running or on its way back, until `stop`; a dead worker is reported to the
scheduler before its replacement starts. All members are driven by one loop over their pending calls: by the caller's
thread during `start`, by a thread of the supervisor's own afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from actors.gateway import GatewayActor, GatewayOptions
from actors.handles import GATEWAY, SCHEDULER, worker_name
from actors.member import Member, Phase
from actors.runtime import NAMESPACE
from actors.scheduler import SchedulerActor, SchedulerOptions
from actors.worker import WorkerActor, WorkerOptions
from cluster.errors import Unavailable
from cluster.gateway.dispatcher import ClusterState
from cluster.observe.logging import event
from cluster.routing.types import WorkerInfo

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]

_POLL_S = 0.25
_ASK_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """One process of the cluster, for people."""

    name: str
    phase: Phase
    pid: int | None
    restarts: int
    failure: str | None


class Supervisor:
    def __init__(
        self, scheduler: SchedulerOptions, workers: Sequence[WorkerOptions], gateway: GatewayOptions, gpus: float
    ) -> None:
        self._gateway_options = gateway
        self._scheduler = Member(SCHEDULER, lambda: _spawn(SchedulerActor, SCHEDULER, 0.0, scheduler))
        share = min(1.0, gpus / len(workers))
        self._workers = {
            options.worker_id: Member(options.worker_id, _worker_spawner(options, share)) for options in workers
        }
        self._gateway = Member(GATEWAY, self._spawn_gateway)
        self._members: list[Member] = []
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def endpoint(self) -> str:
        """host:port of the gateway."""
        loaded = self._gateway.loaded
        if loaded is None or loaded.endpoint is None:
            raise Unavailable("The gateway has not started: try again in a few seconds.")
        return loaded.endpoint

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers as they last loaded."""
        loaded = (member.loaded for member in self._workers.values())
        return [each.worker for each in loaded if each is not None and each.worker is not None]

    def start(self, limit_s: float, progress: Progress, check_interrupt: Callable[[], None]) -> None:
        """Returns when every member runs. `check_interrupt` is called now and then, and may raise.

        Raises:
            TandemError: what kept a member from loading, as it raised it.
        """
        deadline = time.monotonic() + limit_s
        workers = list(self._workers.values())
        stages = [
            ("Starting the scheduler", [self._scheduler]),
            (f"Loading the model in {len(workers)} worker{'s' if len(workers) > 1 else ''}", workers),
            ("Starting the gateway", [self._gateway]),
        ]
        for stage, members in stages:
            progress(stage)
            self._launch(members)
            while any(member.phase is not Phase.RUNNING for member in members):
                check_interrupt()
                for member in self._step(restart=False):
                    raise member.failure or Unavailable(f"{member.name} ended while it was starting: see its log.")
                if time.monotonic() > deadline:
                    raise Unavailable(
                        f"cluster.startup_timeout_s is {limit_s:g}, but the cluster was not ready by then: "
                        "raise it, or start fewer workers."
                    )
        self._thread = threading.Thread(target=self._watch, name="tandem-supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all members. May be called at any time, also during `start`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        for member in (self._gateway, *self._workers.values(), self._scheduler):
            member.end()

    def members(self) -> list[MemberStatus]:
        return [
            MemberStatus(
                name=member.name,
                phase=member.phase,
                pid=member.loaded.pid if member.loaded is not None and member.phase is Phase.RUNNING else None,
                restarts=member.restarts,
                failure=str(member.failure) if member.failure is not None else None,
            )
            for member in self._members
        ]

    def state(self) -> ClusterState:
        """The workers as the scheduler sees them. Raises Unavailable while it restarts."""
        try:
            state: ClusterState = _ask(self._scheduler.handle.state.remote())
        except RayError:
            raise Unavailable("The scheduler is restarting: try again in a few seconds.") from None
        return state

    # ---------------------------------------------------------------- inside

    def _launch(self, members: list[Member]) -> None:
        self._members += members
        for member in members:
            member.launch()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                self._step(restart=True)
            except RayError as error:  # Ray itself is going away, or busy; the next round tells
                logger.warning(event("supervisor_step_failed", error=type(error).__name__))
                self._stopping.wait(_POLL_S)

    def _step(self, restart: bool) -> list[Member]:
        """Waits a moment for something to happen and acts on it; returns the members that went down."""
        pending = {member.pending: member for member in self._members if member.pending is not None}
        if pending:
            ready, _ = ray.wait(list(pending), num_returns=1, timeout=_POLL_S)
        else:
            ready = []
            self._stopping.wait(_POLL_S)
        fallen = [pending[ref] for ref in ready if not pending[ref].advance()]
        for member in fallen:
            self._report_loss(member)
        if restart:
            for member in self._members:
                if member.phase is Phase.DOWN and time.monotonic() >= member.retry_at:
                    logger.info(event("member_restarting", member=member.name, restarts=member.restarts))
                    member.launch()
        return fallen

    def _report_loss(self, member: Member) -> None:
        logger.warning(event("member_lost", member=member.name, why=member.failure))
        worker = member.loaded.worker if member.loaded is not None else None
        if worker is None or self._scheduler.phase is not Phase.RUNNING:
            return
        try:
            _ask(self._scheduler.handle.lose.remote(worker.worker_id, worker.epoch))
        except RayError:
            logger.warning(event("loss_not_reported", worker=worker.worker_id))  # its lease will run out

    def _spawn_gateway(self) -> ActorHandle[Any]:
        endpoint = self._gateway.loaded.endpoint if self._gateway.loaded is not None else None
        return _spawn(GatewayActor, GATEWAY, 0.0, self._gateway_options, self.workers[0], endpoint)


def _worker_spawner(options: WorkerOptions, gpus: float) -> Callable[[], ActorHandle[Any]]:
    return lambda: _spawn(WorkerActor, worker_name(options.worker_id), gpus, options)


def _spawn(actor: Any, name: str, gpus: float, *arguments: object) -> ActorHandle[Any]:
    # Processes are placed by hand here, so Ray is not to count CPUs; it also must not restart an actor behind the
    # supervisor's back, because a new life has to load first.
    placed = actor.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        num_gpus=gpus,
        max_restarts=0,
        max_task_retries=0,
    )
    handle: ActorHandle[Any] = placed.remote(*arguments)
    return handle


def _ask(answer: Any) -> Any:
    return ray.get(answer, timeout=_ASK_LIMIT_S)
