"""The gateway as a running server. Made by the gateway actor and by tests."""

from cluster.gateway.auth import AuthInterceptor, Tenants
from cluster.gateway.dispatcher import Dispatcher
from cluster.gateway.served import ServedModel
from cluster.gateway.service import TandemService
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.server import RpcServer, ServerOptions


class GatewayServer:
    """The public gRPC port: TandemService, health and reflection, behind authentication."""

    def __init__(
        self,
        served: ServedModel,
        dispatcher: Dispatcher,
        tenants: Tenants | None = None,
        options: ServerOptions | None = None,
    ) -> None:
        tenants = tenants or Tenants()
        self._service = TandemService(served, dispatcher, tenants)
        service = tandem_pb2.DESCRIPTOR.services_by_name["TandemService"]
        self._server = RpcServer({service: self._service}, options, [AuthInterceptor(tenants)])

    @property
    def active_requests(self) -> int:
        """Requests that run now."""
        return len(self._service.generation.active)

    async def start(self) -> str:
        """Begins to serve; returns the address as host:port."""
        return await self._server.start()

    async def stop(self, grace_s: float = 0) -> None:
        """Says NOT_SERVING, lets running requests end for `grace_s` seconds, and cancels the rest."""
        await self._server.stop(grace_s)
        await self._service.generation.close()

    async def wait(self) -> None:
        """Returns when the server has stopped."""
        await self._server.wait()
