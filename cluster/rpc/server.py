"""A gRPC server as every process of the cluster runs it: services, health, reflection, limits, and an orderly end.

Invariant: health says SERVING exactly from the end of `start` (or from `set_serving(True)`) to the beginning of `stop`.
Called by `cluster.gateway.server` and by the worker actor, inside a running asyncio loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cluster.rpc.methods import handler_of


@dataclass(frozen=True)
class ServerOptions:
    """Where to listen and what to put up with."""

    host: str = "127.0.0.1"
    port: int = 0
    """0 lets the system choose one."""
    max_message_bytes: int = 16 * 2**20
    max_metadata_bytes: int = 16 * 2**10
    max_idle_s: float = 3600
    write_timeout_s: float = 60
    """How long a client may leave a streamed response unread before its call is ended."""
    keepalive_s: float = 30
    """How often a connection is probed; one that doesn't answer within 20 s is closed and its calls are cancelled."""

    def as_grpc(self) -> list[tuple[str, int]]:
        """The same as gRPC channel arguments."""
        return [
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_metadata_size", self.max_metadata_bytes),
            ("grpc.max_connection_idle_ms", int(self.max_idle_s * 1000)),
            ("grpc.keepalive_time_ms", int(self.keepalive_s * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            # Two servers must never share a port by accident.
            ("grpc.so_reuseport", 0),
        ]


class RpcServer:
    """Serves `services` on one port, without encryption: put it behind a proxy that ends TLS to leave the machine."""

    def __init__(
        self,
        services: Mapping[ServiceDescriptor, object],
        options: ServerOptions | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
    ) -> None:
        options = options or ServerOptions()
        self._names = [service.full_name for service in services]
        self._server = grpc.aio.server(interceptors=interceptors, options=options.as_grpc())
        self._server.add_generic_rpc_handlers(
            [handler_of(service, servicer, options.write_timeout_s) for service, servicer in services.items()]
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection([*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME], self._server)
        self._host, self._wanted_port = options.host, options.port

    async def start(self, serving: bool = True) -> str:
        """Begins to listen; returns the address as host:port. OSError when the port is taken."""
        try:
            port = self._server.add_insecure_port(f"{self._host}:{self._wanted_port}")
        except RuntimeError as error:
            raise OSError(f"{self._host}:{self._wanted_port} can't be listened on") from error
        await self._server.start()
        await self.set_serving(serving)
        return f"{self._host}:{port}"

    async def set_serving(self, serving: bool) -> None:
        """Sets what health checks are told, for the server as a whole and for each service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float = 0) -> None:
        """Says NOT_SERVING, takes no more calls, and gives those that run `grace_s` seconds before it cancels them."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait_for_termination()
