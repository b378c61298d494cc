"""A gateway with workers in one process: real gRPC on loopback, scripted workers, a trivial scheduler."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import grpc

from cluster.core.frontier import Frontier
from cluster.core.paired_cache import Coupling
from cluster.engine.tokenizer import Tokenizer
from cluster.gateway.auth import Tenants
from cluster.gateway.dispatcher import ClusterState
from cluster.gateway.served import ServedModel
from cluster.gateway.server import GatewayServer
from cluster.routing.decisions import Explanation
from cluster.routing.types import (
    DispatchQuery,
    ModelCard,
    Placement,
    PoolSize,
    PoolUsage,
    Refusal,
    WorkerInfo,
    WorkerLoad,
    WorkerStatus,
)
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.client import TandemClient
from cluster.rpc.server import RpcServer, ServerOptions

TINY_TARGET = Path(__file__).parents[2] / "fixtures/models/tiny-target"
CARD = ModelCard("tiny", fingerprint="f", kv_dtype="float32", block_size=16, max_len=512, vocab_size=2048)
POOLS = (PoolSize("target", num_blocks=64, block_size=16, num_bytes=4096, span=0),)
WORKER_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.load(TINY_TARGET)


NOTHING = Frontier(0, None, 0)


@dataclass
class ListDispatcher:
    """Places every request on the first worker that isn't excluded."""

    workers: list[WorkerInfo]
    refusal: Refusal | None = None
    queries: list[DispatchQuery] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)
    explanations: tuple[Explanation, ...] = ()
    expected: Frontier = NOTHING

    async def dispatch(self, query: DispatchQuery) -> Placement | Refusal:
        self.queries.append(query)
        for worker in self.workers:
            if worker.worker_id not in query.exclude and self.refusal is None:
                return Placement(worker.worker_id, worker.epoch, worker.address, self.expected)
        return self.refusal or Refusal("no worker is alive: try again.", 1.0, saturated=False)

    async def suspect(self, worker_id: str, epoch: int) -> None:
        self.suspected.append(worker_id)

    async def explain(self, request_id: str, tenant: str) -> tuple[Explanation, ...]:
        return tuple(each for each in self.explanations if each.request_id == request_id)

    async def state(self) -> ClusterState:
        load = WorkerLoad(running=1, waiting=2, pools=(PoolUsage("target", total=64, free=60, cached=3, in_use=1),))
        statuses = [WorkerStatus(worker, load, "live", 0.1, reserved=0, blocks_known=0) for worker in self.workers]
        return ClusterState(tuple(statuses), directory_up=True)


Script = Callable[[worker_pb2.GenerateRequest, Any], AsyncGenerator[worker_pb2.GenerateResponse, None]]


class ScriptedWorker:
    """A worker whose Generate is a function of the test, for failures that a real one can't be made to show."""

    def __init__(self, script: Script) -> None:
        self.requests: list[worker_pb2.GenerateRequest] = []
        self.cancelled: list[str] = []
        self._script = script

    async def Generate(
        self, request: worker_pb2.GenerateRequest, context: Any
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        self.requests.append(request)
        yield worker_pb2.GenerateResponse()
        async for response in self._script(request, context):
            yield response

    async def Cancel(self, request: worker_pb2.CancelRequest, _context: Any) -> worker_pb2.CancelResponse:
        self.cancelled.append(request.request_id)
        return worker_pb2.CancelResponse(found=True)


def says(*texts: str) -> Script:
    """A script that answers with one token per text."""

    async def script(
        request: worker_pb2.GenerateRequest, _context: Any
    ) -> AsyncGenerator[worker_pb2.GenerateResponse, None]:
        for position, text in enumerate(texts):
            yield worker_pb2.GenerateResponse(position=position, token_ids=[position + 10], text=text)
        yield worker_pb2.GenerateResponse(position=len(texts), completion=completion(request, len(texts)))

    return script


def completion(request: worker_pb2.GenerateRequest, tokens: int) -> tandem_pb2.Completion:
    return tandem_pb2.Completion(
        finish_reason=tandem_pb2.FINISH_REASON_STOP,
        usage=tandem_pb2.Usage(prompt_tokens=len(request.prompt), completion_tokens=tokens),
    )


def worker_info(worker_id: str, address: str, epoch: int = 1) -> WorkerInfo:
    return WorkerInfo(worker_id, epoch, address, CARD, Coupling.NONE, max_running=8, max_queue=8, pools=POOLS)


@dataclass
class Stack:
    """What a test has in hand."""

    client: TandemClient
    address: str
    dispatcher: ListDispatcher
    gateway: GatewayServer

    async def send(self, method: str, raw: bytes) -> tuple[grpc.StatusCode, str]:
        """Sends bytes to a method of TandemService, reads the answer to its end; returns code and message."""
        async with grpc.aio.insecure_channel(self.address) as channel:
            # Any method can be called as one that streams.
            call = channel.unary_stream(f"/tandem.v1.TandemService/{method}")(raw)
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as failure:
                return failure.code(), f"{failure.details()}"
            return grpc.StatusCode.OK, ""


@asynccontextmanager
async def gateway(
    workers: list[WorkerInfo],
    served: ServedModel | None = None,
    tenants: Tenants | None = None,
    options: ServerOptions | None = None,
) -> AsyncGenerator[Stack, None]:
    """A gateway in front of `workers`, and a client of it."""
    dispatcher = ListDispatcher(workers)
    server = GatewayServer(served or ServedModel(CARD, tokenizer(), POOLS), dispatcher, tenants, options)
    address = await server.start()
    try:
        async with TandemClient(address) as client:
            yield Stack(client, address, dispatcher, server)
    finally:
        await server.stop()


@asynccontextmanager
async def scripted(
    *scripts: Script, options: ServerOptions | None = None
) -> AsyncGenerator[tuple[Stack, list[ScriptedWorker]], None]:
    """A gateway in front of one scripted worker for each script."""
    workers = [ScriptedWorker(script) for script in scripts]
    servers = [RpcServer({WORKER_SERVICE: worker}) for worker in workers]
    addresses = [await server.start() for server in servers]
    infos = [worker_info(f"worker-{index}", address) for index, address in enumerate(addresses)]
    try:
        async with gateway(infos, options=options) as stack:
            yield stack, workers
    finally:
        for server in servers:
            await server.stop()


async def collect(
    responses: AsyncGenerator[tandem_pb2.GenerateResponse, None],
) -> tuple[list[int], str, tandem_pb2.Completion]:
    """Token ids, text and completion of a stream; checks that positions are contiguous and the completion is last."""
    tokens: list[int] = []
    text = ""
    last = None
    async for response in responses:
        if last is not None:
            raise AssertionError("a response came after the completion")
        if response.HasField("completion"):
            last = response.completion
            continue
        if response.delta.position != len(tokens):
            raise AssertionError(f"position {response.delta.position} came after {len(tokens)} tokens")
        tokens.extend(response.delta.token_ids)
        text += response.delta.text
    if last is None:
        raise AssertionError("the stream ended without a completion")
    return tokens, text, last


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10) -> None:
    """Waits until `condition` holds; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while True:
            held = condition()
            if held if isinstance(held, bool) else await held:
                return
            await asyncio.sleep(0.005)
