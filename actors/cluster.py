"""A whole Tandem cluster on this machine: Redis, Ray, scheduler, workers and gateway, started and stopped as one.

Invariant: after `start_cluster` has failed or was interrupted, and after `RunningCluster.stop`, no process and no
socket file of it is left. Called by `tandem serve`, `tandem demo` and tests.
"""

from __future__ import annotations

import atexit
import os
import secrets
import socket
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from pydantic import SecretStr

from actors.gateway import GatewayOptions, port_taken
from actors.runtime import RayRuntime, gpus
from actors.scheduler import SchedulerOptions
from actors.signals import Interrupts, uninterrupted
from actors.supervisor import MemberStatus, Progress, Supervisor
from actors.worker import WorkerOptions
from cluster.config import TandemConfig
from cluster.directory.embedded import EmbeddedRedis
from cluster.directory.schema import Schema
from cluster.directory.store import check_url
from cluster.engine.model_folder import read_config, weight_files
from cluster.gateway.auth import digest_of
from cluster.gateway.dispatcher import ClusterState
from cluster.routing.types import WorkerInfo
from cluster.speculation.draft_folder import read_draft_config, weight_files_of

_OWN_TENANT = ""  # which no configured tenant can be called


class RunningCluster:
    """A context manager, which stops the cluster at its end."""

    def __init__(
        self, supervisor: Supervisor, stack: ExitStack, redis: EmbeddedRedis | None, api_key: str | None
    ) -> None:
        self.endpoint = supervisor.endpoint
        """host:port of the public gRPC service."""
        self.api_key = api_key
        """A key of its own for whoever started it; None where no keys are asked for."""
        self.redis = redis
        """The embedded server, if the cluster brought its own."""
        self._supervisor = supervisor
        self._stack = stack

    @property
    def workers(self) -> list[WorkerInfo]:
        """The workers, with model and pools, as they last loaded."""
        return self._supervisor.workers

    def state(self) -> ClusterState:
        """The workers as the scheduler sees them: health, load, blocks known. Raises Unavailable while it restarts."""
        return self._supervisor.state()

    def members(self) -> list[MemberStatus]:
        """The processes, with their ids and restarts."""
        return self._supervisor.members()

    def stop(self) -> None:
        """Ends everything; takes a few seconds. Doing it twice does nothing."""
        with uninterrupted():
            self._stack.close()
        atexit.unregister(self._stack.close)

    def __enter__(self) -> RunningCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_cluster(
    config: TandemConfig, progress: Progress = lambda stage: None, *, schema: Schema | None = None
) -> RunningCluster:
    """Starts a cluster and returns when it serves. `progress` is called with the name of each stage as it begins.

    Raises:
        ConfigError: an option can't be had here, such as the port.
        ModelLoadError: the model or the draft can't be served, in the words of whoever found out.
        Unavailable: a process died while starting, or `cluster.startup_timeout_s` is over.
    """
    progress("Checking the model")
    _check(config)
    stack = ExitStack()
    # A signal between this function's return and the caller's `with` would find nobody else to clean up.
    atexit.register(stack.close)
    try:
        with Interrupts() as interrupts:
            return _start(config, progress, schema or Schema(), stack, interrupts)
    except BaseException:
        with uninterrupted():
            stack.close()
        atexit.unregister(stack.close)
        raise


def _start(
    config: TandemConfig, progress: Progress, schema: Schema, stack: ExitStack, interrupts: Interrupts
) -> RunningCluster:
    """Puts on the stack how to undo each step before it takes the step."""
    redis, redis_url = None, config.cluster.redis_url
    if redis_url is None:
        progress("Starting Redis")
        redis = stack.enter_context(EmbeddedRedis())
        redis_url = redis.url
    else:
        check_url(redis_url)
    progress("Starting Ray")
    runtime = RayRuntime()
    stack.callback(runtime.stop)
    runtime.start(log_to_driver=True)
    interrupts.check()
    api_key = secrets.token_urlsafe(32) if config.cluster.api_keys else None
    supervisor = _supervisor(config, redis_url, schema, api_key)
    stack.callback(supervisor.stop)
    supervisor.start(config.cluster.startup_timeout_s, progress, interrupts.check)
    interrupts.check()
    return RunningCluster(supervisor, stack, redis, api_key)


def _check(config: TandemConfig) -> None:
    """Finds what can be found without starting anything."""
    engine = config.to_engine_config()
    read_config(engine.model)
    weight_files(engine.model)
    if engine.draft is not None:
        read_draft_config(engine.draft)
        weight_files_of(engine.draft, engine.allow_pickle)
    host, port = config.cluster.host, config.cluster.port
    try:
        with socket.create_server((host, port)):
            pass
    except OSError:
        raise port_taken(host, port) from None


def _supervisor(config: TandemConfig, redis_url: SecretStr, schema: Schema, api_key: str | None) -> Supervisor:
    engine = config.to_engine_config()
    if engine.threads is None:
        # Without a limit each worker would start a thread per core, and they would all be in each other's way.
        engine = replace(engine, threads=max(1, (os.cpu_count() or 1) // config.cluster.workers))
    secret, own_key = config.cluster.tenant_secret, {} if api_key is None else {_OWN_TENANT: digest_of(api_key)}
    return Supervisor(
        scheduler=SchedulerOptions(redis_url, schema, log_level=config.log_level),
        workers=[
            WorkerOptions(f"worker-{index}", engine, config.model_name, log_level=config.log_level)
            for index in range(config.cluster.workers)
        ],
        gateway=GatewayOptions(
            host=config.cluster.host,
            port=config.cluster.port,
            model=engine.model,
            secret=secrets.token_bytes(32) if secret is None else secret.get_secret_value().encode(),
            key_digests={**config.cluster.api_keys, **own_key},
            draft=engine.draft.name if engine.draft is not None else None,
            log_level=config.log_level,
        ),
        gpus=gpus(),
    )
