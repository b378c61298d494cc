"""Binds servicers to gRPC methods, straight from the service descriptors.

Owns the edge of every RPC. Invariant: whatever bytes a client sends and whatever a servicer raises, the call ends with
a status of the error tree. gRPC's own deserializing answers malformed bytes with INTERNAL, and an exception with its
text, so messages are parsed and errors mapped here.
A servicer has one method for each of the service's, by its name: an async generator of responses where the service
streams, else a coroutine. It raises `TandemError`s.
Called by `cluster.rpc.server`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from cluster.errors import DeadlineExceeded, InvalidRequest, TandemError
from cluster.rpc import status

_Context = grpc.aio.ServicerContext[Any, Any]


def handler_of(service: ServiceDescriptor, servicer: object, write_timeout_s: float) -> grpc.GenericRpcHandler:
    """The gRPC handler of all methods of `service`, as `servicer` does them.

    A client that leaves a streamed response unread for `write_timeout_s`, once all buffers are full, loses its call.
    """
    handlers = {
        method.name: _bind(method, getattr(servicer, method.name), write_timeout_s) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _bind(
    method: MethodDescriptor, serve: Callable[..., Any], write_timeout_s: float
) -> grpc.RpcMethodHandler[Any, Any]:
    if inspect.isasyncgenfunction(serve) != method.server_streaming:
        raise TypeError(f"{method.full_name} and {serve.__qualname__} differ in whether they stream")
    request_type = GetMessageClass(method.input_type)
    serializer = GetMessageClass(method.output_type).SerializeToString
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _streaming(method, request_type, serve, write_timeout_s), None, serializer
        )
    return grpc.unary_unary_rpc_method_handler(_unary(method, request_type, serve), None, serializer)


def _unary(
    method: MethodDescriptor, request_type: type[Message], serve: Callable[[Any, _Context], Awaitable[Message]]
) -> Callable[[bytes, _Context], Awaitable[Message]]:
    async def call(raw: bytes, context: _Context) -> Message:
        async with _errors_mapped(method, context):
            return await serve(_parse(request_type, raw), context)

    return call


def _streaming(
    method: MethodDescriptor,
    request_type: type[Message],
    serve: Callable[[Any, _Context], AsyncGenerator[Message, None]],
    write_timeout_s: float,
) -> Callable[[bytes, _Context], Awaitable[None]]:
    # One coroutine that writes, rather than a generator that gRPC drives: a client that goes away then cancels it
    # wherever it stands, and `aclosing` runs the servicer's clean-up at once.
    async def call(raw: bytes, context: _Context) -> None:
        async with (
            _errors_mapped(method, context),
            aclosing(serve(_parse(request_type, raw), context)) as responses,
        ):
            async for response in responses:
                await _write(context, response, write_timeout_s)

    return call


async def _write(context: _Context, response: Message, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await context.write(response)
    except TimeoutError:
        raise DeadlineExceeded(f"Nothing of the answer was read for {timeout_s:g} s: read it as it comes.") from None


def _parse(request_type: type[Message], raw: bytes) -> Message:
    try:
        return request_type.FromString(raw)
    except DecodeError as error:
        name = request_type.DESCRIPTOR.full_name
        raise InvalidRequest(
            "request body",
            f"{len(raw)} bytes that can't be read",
            f"a protobuf message {name} whose strings are UTF-8",
            "make it with code generated from the .proto of this server's version",
        ) from error


@asynccontextmanager
async def _errors_mapped(method: MethodDescriptor, context: _Context) -> AsyncIterator[None]:
    try:
        yield
    except TandemError as error:
        await status.abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        await status.abort(context, status.internal(method.full_name, error))
