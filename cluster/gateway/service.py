"""The public gRPC service, `tandem.v1.TandemService`.

Invariant: thin; what is common to all protocols is in `Generation`. Errors are raised as they are and mapped by
`cluster.rpc.methods`. Called by gRPC; made by `cluster.gateway.server`.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import grpc

from cluster.errors import InvalidRequest
from cluster.gateway import convert
from cluster.gateway.auth import Tenants
from cluster.gateway.dispatcher import Dispatcher
from cluster.gateway.generation import Generation
from cluster.gateway.served import ServedModel
from cluster.rpc._generated.tandem.v1 import tandem_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


class TandemService:
    """Serves one model."""

    def __init__(self, served: ServedModel, dispatcher: Dispatcher, tenants: Tenants) -> None:
        self._served, self._dispatcher, self._tenants = served, dispatcher, tenants
        self.generation = Generation(served, dispatcher, tenants)

    async def Generate(
        self, request: tandem_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[tandem_pb2.GenerateResponse, None]:
        """Streams the answer to one prompt."""
        fields = convert.request_from_wire(request)
        responses = self.generation.run(fields, self._tenant(context), context.time_remaining())
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def Cancel(self, request: tandem_pb2.CancelRequest, context: _Context) -> tandem_pb2.CancelResponse:
        """Ends a request that runs in this gateway."""
        active = self.generation.active.find(self._tenant(context), request.request_id)
        if active is not None:
            await active.cancel()
        return tandem_pb2.CancelResponse(found=active is not None)

    async def ListModels(
        self, _request: tandem_pb2.ListModelsRequest, _context: _Context
    ) -> tandem_pb2.ListModelsResponse:
        """Lists the one model."""
        return tandem_pb2.ListModelsResponse(models=[convert.model_to_wire(self._served)])

    async def ClusterStatus(
        self, _request: tandem_pb2.ClusterStatusRequest, _context: _Context
    ) -> tandem_pb2.ClusterStatusResponse:
        """Describes the cluster as the scheduler sees it."""
        state = await self._dispatcher.state()
        return convert.status_to_wire(self._served, state, self.generation.accuracy, _version())

    async def Explain(self, request: tandem_pb2.ExplainRequest, context: _Context) -> tandem_pb2.ExplainResponse:
        """Tells how a recent request was placed."""
        told = await self._dispatcher.explain(request.request_id, self._tenant(context))
        if not told:
            limit = "that of one of your requests among those placed last"
            raise InvalidRequest("request_id", request.request_id, limit, "ask sooner, or check the id")
        return tandem_pb2.ExplainResponse(decisions=[convert.explanation_to_wire(each) for each in told])

    def _tenant(self, context: _Context) -> str:
        return self._tenants.tenant_of(context.invocation_metadata() or ())


def _version() -> str:
    try:
        return version("tandem-serving")
    except PackageNotFoundError:
        return "uninstalled"
