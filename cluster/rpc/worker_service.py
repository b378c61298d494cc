"""The worker's gRPC service over its engine loop, `tandem.internal.v1.WorkerService`.

Invariant: a stream begins with an empty message once the engine has the request, and ends with a completion or an
error; leaving it in any other way cancels the request in the engine, which gives its blocks back within a step.
Called by gRPC; made by the worker actor.
"""

import time
from collections.abc import AsyncGenerator
from typing import Any

import grpc

from cluster.core.request import FinishReason
from cluster.engine.events import EngineRequest, RequestEvent
from cluster.engine.loop import EngineLoop
from cluster.errors import CapacityExceeded, DeadlineExceeded, StaleEpoch, TandemError, Unavailable
from cluster.rpc import convert
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2

_Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService:
    """Serves one life of one worker."""

    def __init__(self, loop: EngineLoop, epoch: int) -> None:
        self._loop, self._epoch = loop, epoch
        self._running: set[str] = set()

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: _Context
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        """Runs one request."""
        if request.epoch != self._epoch:
            raise StaleEpoch(request.epoch, self._epoch)
        stream = await self._loop.submit(_engine_request(request, context.time_remaining()))
        self._running.add(request.request_id)
        position, finished = 0, False
        try:
            yield worker_pb2.GenerateResponse()
            async for event in stream:
                finished = event.finish is not None
                yield _response(event, position)
                position += len(event.token_ids)
        finally:
            self._running.discard(request.request_id)
            if not finished:
                self._loop.cancel(request.request_id)

    async def Cancel(self, request: worker_pb2.CancelRequest, _context: _Context) -> worker_pb2.CancelResponse:
        """Ends a request; its stream gets the completion."""
        found = request.request_id in self._running
        if found:
            self._loop.cancel(request.request_id)
        return worker_pb2.CancelResponse(found=found)


def _engine_request(request: worker_pb2.GenerateRequest, timeout_s: float | None) -> EngineRequest:
    return EngineRequest(
        request_id=request.request_id,
        prompt=tuple(request.prompt),
        sampling=convert.sampling_from_wire(request.sampling),
        priority=request.priority,
        deadline=None if timeout_s is None else time.monotonic() + timeout_s,
        tenant_salt=request.tenant_salt,
        speculate=request.speculate,
        reuse=request.reuse,
    )


def _response(event: RequestEvent, position: int) -> worker_pb2.GenerateResponse:
    """The message for an event. Raises the error of a request that failed."""
    response = worker_pb2.GenerateResponse(
        position=position,
        token_ids=event.token_ids,
        text=event.text,
        logprobs=convert.logprobs_to_wire(event.logprobs or ()),
    )
    if event.finish in convert.FINISH_REASONS and event.usage is not None:
        response.completion.CopyFrom(convert.completion_to_wire(event.finish, event.usage))
    elif event.finish is not None:
        raise _failure(event)
    return response


def _failure(event: RequestEvent) -> TandemError:
    if event.error is not None:
        return event.error
    match event.finish:
        case FinishReason.DEADLINE:
            return DeadlineExceeded("The deadline passed before the answer was complete: allow more time.")
        case FinishReason.REJECTED:
            return CapacityExceeded("The worker can't take the request now: try again in a second.")
    return Unavailable("The worker gave the request up: send it again.")
