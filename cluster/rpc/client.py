"""A small asyncio client of the public API, for the command line, benchmarks and tests.

Invariant: what a server refuses is raised as the same class of `cluster.errors` with the same fields; leaving a stream
early cancels the request. Called by `cluster.cli`; users of other languages generate their own from `proto/`.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from cluster.errors import InvalidRequest, TandemError
from cluster.rpc import status
from cluster.rpc._generated.tandem.v1 import tandem_pb2

_SERVICE = f"/{tandem_pb2.DESCRIPTOR.services_by_name['TandemService'].full_name}"
_OPTIONS = [("grpc.max_receive_message_length", 16 * 2**20)]
_UNARY_TIMEOUT_S = 30.0
_Response = TypeVar("_Response", bound=Message)

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
"""Text; token ids; or chat messages with `role` and `content`."""


class TandemClient:
    """Calls one gateway. Belongs to one asyncio loop; an async context manager that closes its connection."""

    def __init__(self, address: str, api_key: str | None = None) -> None:
        """`address` is host:port. Raises InvalidRequest if `api_key` can't be a header."""
        if api_key and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequest(
                "api_key", "one with other characters", "printable ASCII", "send the key as it was made"
            )
        self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        request_id: str = "",
        priority: int | None = None,
        speculate: bool | None = None,
        reuse: bool | None = None,
        worker_id: str = "",
        timeout_s: float | None = None,
        **sampling: Any,
    ) -> AsyncGenerator[tandem_pb2.GenerateResponse, None]:
        """Streams deltas and one completion. `sampling` takes the fields of SamplingParams; None leaves one unset.

        `structured_output` may be a mapping, such as {"regex": "[a-z]+"} or {"json_object": {}}.
        """
        request = tandem_pb2.GenerateRequest(
            model=model,
            sampling=tandem_pb2.SamplingParams(**sampling),
            request_id=request_id,
            priority=priority,
            speculate=speculate,
            reuse=reuse,
            worker_id=worker_id,
            **_input(prompt),
        )
        method = self._channel.unary_stream(
            f"{_SERVICE}/Generate",
            request_serializer=tandem_pb2.GenerateRequest.SerializeToString,
            response_deserializer=tandem_pb2.GenerateResponse.FromString,
        )
        call = method(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as failure:
            raise _error_of(failure) from failure
        finally:
            call.cancel()

    async def cancel(self, request_id: str) -> bool:
        """Ends a running request; returns whether it was found."""
        request = tandem_pb2.CancelRequest(request_id=request_id)
        return (await self._call("Cancel", request, tandem_pb2.CancelResponse)).found

    async def models(self) -> Sequence[tandem_pb2.Model]:
        """The models served."""
        response = await self._call("ListModels", tandem_pb2.ListModelsRequest(), tandem_pb2.ListModelsResponse)
        return response.models

    async def status(self) -> tandem_pb2.ClusterStatusResponse:
        """How the cluster is."""
        return await self._call("ClusterStatus", tandem_pb2.ClusterStatusRequest(), tandem_pb2.ClusterStatusResponse)

    async def explain(self, request_id: str) -> Sequence[tandem_pb2.PlacementDecision]:
        """How a recent request was placed, one decision for each attempt."""
        request = tandem_pb2.ExplainRequest(request_id=request_id)
        return (await self._call("Explain", request, tandem_pb2.ExplainResponse)).decisions

    async def close(self) -> None:
        """Closes the connection and cancels what runs on it."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, name: str, request: Message, kind: type[_Response]) -> _Response:
        method = self._channel.unary_unary(
            f"{_SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        try:
            return await method(request, timeout=_UNARY_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as failure:
            raise _error_of(failure) from failure


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    messages = [tandem_pb2.ChatMessage(**each) for each in prompt if not isinstance(each, int)]
    if messages:
        return {"chat": tandem_pb2.ChatInput(messages=messages)}
    return {"tokens": tandem_pb2.TokenInput(ids=[each for each in prompt if isinstance(each, int)])}


def _error_of(failure: grpc.aio.AioRpcError) -> TandemError:
    return status.error_of(failure) or TandemError(f"The call failed ({failure.code().name}): {failure.details()}.")
