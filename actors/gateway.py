"""The gateway's process: the public server, and its view of the scheduler through Ray.

Invariant: it holds no state that its replacement would miss; a new one listens on the same port. Created and watched by
`actors.supervisor`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from actors.handles import SchedulerClient
from actors.member import Loaded
from cluster.errors import ConfigError, TandemError
from cluster.observe.logging import event, setup
from cluster.routing.types import WorkerInfo

if TYPE_CHECKING:
    from cluster.gateway.served import ServedModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    host: str
    port: int
    """0 takes a free one."""
    model: Path
    """Folder of the target model, for its tokenizer."""
    secret: bytes = field(repr=False)
    """Separates the reusable KV of tenants; the same for every life of the gateway, or they would find nothing
    again."""
    key_digests: Mapping[str, str] = field(default_factory=dict, repr=False)
    """SHA-256 of each tenant's API key; none lets everyone in."""
    draft: str | None = None
    """Name of the draft model, for clients."""
    log_level: str = "info"


@ray.remote
class GatewayActor:
    def __init__(self, options: GatewayOptions, worker: WorkerInfo, endpoint: str | None) -> None:
        """`worker` describes the model that is served; `endpoint` is where an earlier life listened."""
        setup(options.log_level)
        self._options, self._worker, self._endpoint = options, worker, endpoint

    async def load(self) -> Loaded | TandemError:
        # These bring the tokenizer's libraries along, which the process that starts the cluster has no use for.
        from cluster.gateway.auth import Tenants
        from cluster.gateway.server import GatewayServer
        from cluster.rpc.server import ServerOptions

        try:
            served = await asyncio.to_thread(self._load_model)
        except TandemError as refusal:
            return refusal
        options, port = self._options, self._options.port
        if self._endpoint is not None:
            port = int(self._endpoint.rpartition(":")[2])
        tenants = Tenants(options.key_digests, options.secret)
        self._server = GatewayServer(served, SchedulerClient(), tenants, ServerOptions(host=options.host, port=port))
        try:
            endpoint = await self._server.start()
        except OSError:
            return port_taken(options.host, port)
        logger.info(event("gateway_ready", endpoint=endpoint, pid=os.getpid()))
        return Loaded(os.getpid(), endpoint=endpoint)

    async def run(self) -> None:
        await self._server.wait()

    def _load_model(self) -> ServedModel:
        from cluster.engine.tokenizer import Tokenizer
        from cluster.gateway.served import ServedModel

        worker = self._worker
        return ServedModel(
            card=worker.model,
            tokenizer=Tokenizer.load(self._options.model),
            pools=worker.pools,
            method=worker.method,
            num_speculative_tokens=worker.num_speculative_tokens,
            draft=self._options.draft,
        )


def port_taken(host: str, port: int) -> ConfigError:
    """What a user is told when the public port can't be had."""
    return ConfigError(
        f"cluster.port is {port}, but must be a port of {host} that this user may listen on and no other process does: "
        "choose another one, or 0 for any free one."
    )
