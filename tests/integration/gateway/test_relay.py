"""The gateway in front of scripted workers: relaying, retrying, failing, cancelling."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from cluster.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    Internal,
    InvalidRequest,
    StaleEpoch,
    TandemError,
    Unavailable,
)
from cluster.routing.types import Refusal
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.server import ServerOptions
from tests.integration.gateway.harness import collect, eventually, gateway, says, scripted, worker_info

Responses = AsyncGenerator[worker_pb2.GenerateResponse, None]


class Hanging:
    """Says one token (or none), then waits until its stream is left."""

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = tokens
        self.left = False

    async def __call__(self, _request: worker_pb2.GenerateRequest, _context: Any) -> Responses:
        try:
            for position in range(self.tokens):
                yield worker_pb2.GenerateResponse(position=position, token_ids=[5], text="a")
            await asyncio.Event().wait()
        finally:
            self.left = True


def failing(error: Exception, after: int = 0) -> Any:
    async def script(_request: worker_pb2.GenerateRequest, _context: Any) -> Responses:
        for position in range(after):
            yield worker_pb2.GenerateResponse(position=position, token_ids=[5], text="a")
        raise error

    return script


async def test_deltas_and_completion_come_through() -> None:
    async with scripted(says("Hello", ", ", "world")) as (stack, (worker,)):
        tokens, text, last = await collect(stack.client.generate([3, 4, 5], max_tokens=7, temperature=0))
        assert (tokens, text) == ([10, 11, 12], "Hello, world")
        assert (last.worker_id, last.usage.prompt_tokens) == ("worker-0", 3)
        assert 0 < last.timings.queue_s <= last.timings.time_to_first_token_s <= last.timings.total_s
        (request,) = worker.requests
        assert (list(request.prompt), request.sampling.max_tokens) == ([3, 4, 5], 7)
        assert request.sampling.HasField("seed")
        assert (request.speculate, request.reuse) == (True, True)


async def test_the_answer_carries_the_clients_id_or_one_made_for_it() -> None:
    async with scripted(says("a")) as (stack, _):
        named = {response.request_id async for response in stack.client.generate("hi", request_id="mine")}
        unnamed = {response.request_id async for response in stack.client.generate("hi")}
    assert named == {"mine"}
    assert len(unnamed) == 1 and unnamed.pop().startswith("gen-")


async def test_a_worker_that_is_gone_is_passed_over_once() -> None:
    async with scripted(says("a")) as (stack, _):
        # Port 9 (discard) refuses connections on any test machine.
        stack.dispatcher.workers.insert(0, worker_info("dead", "127.0.0.1:9"))
        _, text, last = await collect(stack.client.generate("hi"))
        assert (text, last.worker_id) == ("a", "worker-0")
        assert stack.dispatcher.suspected == ["dead"]
        assert stack.dispatcher.queries[1].exclude == {"dead"}


@pytest.mark.parametrize("error", [Unavailable("Going down."), CapacityExceeded("Full.")])
async def test_a_worker_that_refuses_before_the_first_token_is_passed_over(error: TandemError) -> None:
    async with scripted(failing(error), says("a")) as (stack, _):
        _, text, last = await collect(stack.client.generate("hi"))
        assert (text, last.worker_id) == ("a", "worker-1")


async def test_after_the_first_token_a_lost_worker_ends_the_request() -> None:
    async with scripted(failing(Unavailable("Going down."), after=2), says("b")) as (stack, workers):
        with pytest.raises(Unavailable, match="after 2 tokens"):
            await collect(stack.client.generate("hi"))
        assert workers[1].requests == []


async def test_two_refusals_end_the_request_with_the_second() -> None:
    error = CapacityExceeded("Full: try again.", retry_after_s=0.25)
    async with scripted(failing(error), failing(error), says("a")) as (stack, workers):
        with pytest.raises(CapacityExceeded) as caught:
            await collect(stack.client.generate("hi"))
        assert caught.value.retry_after_s == 0.25
        assert workers[2].requests == []


async def test_a_stale_epoch_is_retried_elsewhere() -> None:
    async with scripted(failing(StaleEpoch(1, 2)), says("a")) as (stack, _):
        _, text, _ = await collect(stack.client.generate("hi"))
        assert (text, stack.dispatcher.suspected) == ("a", [])


@pytest.mark.parametrize(("saturated", "kind"), [(True, CapacityExceeded), (False, Unavailable)])
async def test_a_schedulers_refusal_reaches_the_client(saturated: bool, kind: type[TandemError]) -> None:
    async with scripted(says("a")) as (stack, _):
        stack.dispatcher.refusal = Refusal("All places are taken: try later.", 0.5, saturated)
        with pytest.raises(kind, match="All places are taken"):
            await collect(stack.client.generate("hi"))


@pytest.mark.parametrize("after", [0, 1])
async def test_no_exception_text_of_a_worker_reaches_the_client(after: int) -> None:
    async with scripted(failing(RuntimeError("secret-detail"), after)) as (stack, _):
        with pytest.raises(Internal) as caught:
            await collect(stack.client.generate("hi"))
        assert "secret-detail" not in repr(caught.value.fields)
        assert len(caught.value.error_id) == 16


async def test_no_exception_text_of_the_gateway_reaches_the_client(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted(says("a")) as (stack, _):

        async def broken(_query: object) -> None:
            raise RuntimeError("secret-detail")

        stack.dispatcher.dispatch = broken  # type: ignore[assignment, method-assign]
        code, details = await stack.send("Generate", tandem_pb2.GenerateRequest(text="hi").SerializeToString())
        assert code is grpc.StatusCode.INTERNAL
        assert "secret-detail" not in details
        with pytest.raises(Internal) as caught:
            await collect(stack.client.generate("hi"))
        assert "secret-detail" not in repr(caught.value.fields)
    assert "secret-detail" in caplog.text


async def test_leaving_the_stream_cancels_the_worker() -> None:
    script = Hanging()
    async with scripted(script) as (stack, _):
        stream = stack.client.generate("hi")
        await anext(stream)
        assert stack.gateway.active_requests == 1
        await stream.aclose()
        await eventually(lambda: script.left and stack.gateway.active_requests == 0)


async def test_closing_the_connection_during_prefill_cancels_the_worker() -> None:
    script = Hanging(tokens=0)
    async with scripted(script) as (stack, (worker,)):
        pending = asyncio.create_task(anext(stack.client.generate("hi")))
        await eventually(lambda: bool(worker.requests))
        pending.cancel()
        await stack.client.close()
        await eventually(lambda: script.left and stack.gateway.active_requests == 0)


async def test_the_deadline_is_carried_to_the_worker_and_ends_it() -> None:
    remaining: list[float] = []
    script = Hanging()

    async def timed(request: worker_pb2.GenerateRequest, context: Any) -> Responses:
        remaining.append(context.time_remaining())
        async for response in script(request, context):
            yield response

    async with scripted(timed) as (stack, _):
        with pytest.raises(DeadlineExceeded):
            await collect(stack.client.generate("hi", timeout_s=0.5))
        assert 0 < remaining[0] <= 0.5
        await eventually(lambda: script.left and stack.gateway.active_requests == 0)


async def test_a_client_that_reads_nothing_holds_the_worker_back_and_is_let_go_in_time() -> None:
    sent, left = [], asyncio.Event()

    async def flood(_request: worker_pb2.GenerateRequest, _context: Any) -> Responses:
        try:
            for position in range(2000):
                sent.append(position)
                yield worker_pb2.GenerateResponse(position=position, token_ids=[1], text="x" * 100_000)
        finally:
            left.set()

    async with scripted(flood, options=ServerOptions(write_timeout_s=0.5)) as (stack, _):
        stream = stack.client.generate("hi")
        await anext(stream)
        async with asyncio.timeout(10):
            await left.wait()
        assert len(sent) < 1000
        with pytest.raises(DeadlineExceeded, match=r"read for 0\.5 s"):
            async for _ in stream:
                pass
        assert stack.gateway.active_requests == 0


async def test_cancel_goes_to_the_worker_that_has_the_request() -> None:
    script = Hanging()
    async with scripted(script) as (stack, (worker,)):
        stream = stack.client.generate("hi", request_id="mine")
        await anext(stream)
        assert await stack.client.cancel("mine") is True
        assert worker.cancelled == [worker.requests[0].request_id]
        assert await stack.client.cancel("other") is False
        await stream.aclose()


async def test_the_id_of_a_running_request_is_refused_and_free_again_afterwards() -> None:
    script = Hanging()
    async with scripted(script) as (stack, _):
        stream = stack.client.generate("hi", request_id="mine")
        await anext(stream)
        with pytest.raises(InvalidRequest, match="request_id is mine"):
            await collect(stack.client.generate("hi", request_id="mine"))
        await stream.aclose()
        await eventually(lambda: stack.gateway.active_requests == 0)
        second = stack.client.generate("hi", request_id="mine")
        await anext(second)
        await second.aclose()


async def test_workers_get_another_id_for_each_request() -> None:
    async with scripted(says("a")) as (stack, (worker,)):
        for _ in range(2):
            await collect(stack.client.generate("hi", request_id="mine"))
        first, second = (request.request_id for request in worker.requests)
        assert first != second
        assert first.startswith("mine-") and second.startswith("mine-")


async def test_a_new_life_at_the_same_address_is_reached_at_once() -> None:
    async with scripted(says("a")) as (stack, _):
        info = stack.dispatcher.workers[0]
        dead = worker_info(info.worker_id, "127.0.0.1:9", epoch=1)
        stack.dispatcher.workers[:] = [dead]
        with pytest.raises(Unavailable):
            await collect(stack.client.generate("hi"))
        stack.dispatcher.workers[:] = [worker_info(info.worker_id, info.address, epoch=2)]
        _, text, _ = await collect(stack.client.generate("hi"))
        assert text == "a"


async def test_a_worker_that_skips_a_position_is_a_defect_and_not_passed_on() -> None:
    async def skipping(_request: worker_pb2.GenerateRequest, _context: Any) -> Responses:
        yield worker_pb2.GenerateResponse(position=0, token_ids=[1], text="a")
        yield worker_pb2.GenerateResponse(position=2, token_ids=[3], text="c")

    async with scripted(skipping) as (stack, _):
        with pytest.raises(Internal):
            await collect(stack.client.generate("hi"))


async def test_no_workers_at_all() -> None:
    async with gateway([]) as stack:
        with pytest.raises(Unavailable, match="no worker is alive"):
            await collect(stack.client.generate("hi"))
        status = await stack.client.status()
        assert list(status.workers) == []
