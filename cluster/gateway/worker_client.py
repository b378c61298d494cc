"""Streams from workers.

Owns the channels to workers, one for each worker's present life. Invariant: leaving a stream in any way cancels the
call, so a worker never runs a request that nobody reads. Called by `cluster.gateway.generation`.
"""

from collections.abc import AsyncGenerator

import grpc

from cluster.errors import TandemError, Unavailable
from cluster.routing.types import Placement
from cluster.rpc import status
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2

_SERVICE = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}"
_CANCEL_TIMEOUT_S = 5.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 16 * 2**20),
    ("grpc.max_send_message_length", 16 * 2**20),
    # A worker whose machine went away without a word is noticed this way.
    ("grpc.keepalive_time_ms", 15_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A new life at an old address must not wait out the reconnect back-off of the earlier one.
    ("grpc.use_local_subchannel_pool", 1),
]


class WorkerClients:
    """Calls to any number of workers. Belongs to one asyncio loop."""

    def __init__(self) -> None:
        self._channels: dict[str, tuple[int, grpc.aio.Channel]] = {}

    async def generate(
        self, placement: Placement, request: worker_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """Runs `request` on the worker of `placement`.

        Raises Unavailable when that worker is gone, and whatever error it answered with.
        """
        method = (await self._channel(placement)).unary_stream(
            f"{_SERVICE}/Generate",
            request_serializer=worker_pb2.GenerateRequest.SerializeToString,
            response_deserializer=worker_pb2.GenerateResponse.FromString,
        )
        call = method(request, timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as failure:
            raise _error_of(failure, placement) from failure
        finally:
            call.cancel()

    async def cancel(self, placement: Placement, request_id: str) -> bool:
        """Ends a request that runs there; returns whether it was found."""
        method = (await self._channel(placement)).unary_unary(
            f"{_SERVICE}/Cancel",
            request_serializer=worker_pb2.CancelRequest.SerializeToString,
            response_deserializer=worker_pb2.CancelResponse.FromString,
        )
        try:
            response = await method(worker_pb2.CancelRequest(request_id=request_id), timeout=_CANCEL_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise _error_of(failure, placement) from failure
        return bool(response.found)

    async def close(self) -> None:
        """Closes every channel; calls that still run are cancelled."""
        channels, self._channels = self._channels, {}
        for _epoch, channel in channels.values():
            await channel.close()

    async def _channel(self, placement: Placement) -> grpc.aio.Channel:
        epoch, channel = self._channels.get(placement.worker_id, (None, None))
        if channel is not None and epoch == placement.epoch:
            return channel
        fresh = grpc.aio.insecure_channel(placement.address, options=_OPTIONS)
        self._channels[placement.worker_id] = (placement.epoch, fresh)
        if channel is not None:
            await channel.close()
        return fresh


def _error_of(failure: grpc.aio.AioRpcError, placement: Placement) -> TandemError:
    error = status.error_of(failure)
    if error is None:
        return status.internal(f"{_SERVICE} of {placement.worker_id}", failure)
    if type(error) is Unavailable:
        return Unavailable("The worker that this request ran on is gone: send the request again.")
    return error
