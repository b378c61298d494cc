"""What any client can do to the gateway's port: bad input, malformed bytes, missing keys, health, reflection."""

import asyncio
import math
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.core.frontier import Frontier
from cluster.errors import InvalidRequest, ModelNotFound, PromptTooLarge, Unauthenticated
from cluster.gateway.auth import Tenants, digest_of
from cluster.gateway.served import ServedModel
from cluster.routing.decisions import Explanation, PricedWorker
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.client import TandemClient
from tests.integration.gateway.harness import CARD, POOLS, collect, gateway, says, scripted, tokenizer

BAD = [
    ("prompt-empty", "", {}, ["prompt", "empty", "at least 1 token"]),
    ("prompt-no-tokens", [], {}, ["prompt", "empty", "1 to 511 tokens"]),
    ("prompt-too-long", [1] * 512, {}, ["prompt", "512 tokens", "1 to 511 tokens"]),
    ("prompt-too-many-characters", "a" * 70_000, {}, ["prompt", "70000 characters", "at most 65536"]),
    ("text-too-long-once-tokenized", "q z " * 600, {}, ["prompt", "tokens long", "at most 511 tokens"]),
    ("token-out-of-range", [1, 2048], {}, ["prompt[1]", "2048", "from 0 to 2047"]),
    ("max-tokens-0", "hi", {"max_tokens": 0}, ["max_tokens", " 0,", "from 1 to 511"]),
    ("max-tokens-2^63", "hi", {"max_tokens": 2**63}, ["max_tokens", str(2**63), "from 1 to 511"]),
    ("max-tokens-over-room", [1] * 500, {"max_tokens": 13}, ["max_tokens", "13", "at most 12"]),
    ("temperature-nan", "hi", {"temperature": math.nan}, ["temperature", "nan", "0 or from 0.01 to 2"]),
    ("temperature-negative", "hi", {"temperature": -1.0}, ["temperature", "-1.0", "0 or from 0.01 to 2"]),
    ("temperature-inf", "hi", {"temperature": math.inf}, ["temperature", "inf", "0 or from 0.01 to 2"]),
    ("top-p", "hi", {"top_p": 1.5}, ["top_p", "1.5", "to 1"]),
    ("logprobs", "hi", {"logprobs": 4_000_000_000}, ["logprobs", "4000000000", "from 0 to 20"]),
    ("stop", "hi", {"stop": ["x"] * 17}, ["stop", "17 strings", "0 to 16"]),
    ("role", [{"role": "tool", "content": "x"}], {}, ["messages[0].role", "tool", "system, user, assistant"]),
    ("priority", "hi", {"priority": 1000}, ["priority", "1000", "-100 to 100"]),
    ("request-id", "hi", {"request_id": "../etc"}, ["request_id", "../etc", "1 to 128"]),
]


@pytest.mark.parametrize(("prompt", "fields", "parts"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
async def test_bad_input_is_refused_by_name_and_reaches_no_worker(
    prompt: Any, fields: dict[str, Any], parts: list[str]
) -> None:
    async with scripted(says("fine")) as (stack, (worker,)):
        with pytest.raises(InvalidRequest) as caught:
            await collect(stack.client.generate(prompt, **fields))
        assert caught.value.grpc_code == "INVALID_ARGUMENT"
        for part in parts:
            assert part in str(caught.value)
        assert worker.requests == []
        assert stack.dispatcher.queries == []
        _, text, _ = await collect(stack.client.generate("hi"))
        assert text == "fine"


async def test_the_status_code_of_bad_input_is_invalid_argument_with_the_same_sentence() -> None:
    async with scripted(says("a")) as (stack, _):
        request = tandem_pb2.GenerateRequest(text="hi", sampling=tandem_pb2.SamplingParams(max_tokens=0))
        code, details = await stack.send("Generate", request.SerializeToString())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("max_tokens is 0, but must be from 1 to 511: ")


async def test_a_prompt_larger_than_a_pool_names_its_blocks() -> None:
    small = ServedModel(CARD, tokenizer(), (replace(POOLS[0], num_blocks=4),))
    async with gateway([], served=small) as stack:
        with pytest.raises(PromptTooLarge) as caught:
            await collect(stack.client.generate([1] * 60, max_tokens=10))
        error = caught.value
        assert (error.needed_blocks, error.available_blocks, error.largest_prompt) == (5, 4, 55)


async def test_an_unknown_model_is_not_found() -> None:
    async with scripted(says("a")) as (stack, (worker,)):
        with pytest.raises(ModelNotFound, match="gpt-9"):
            await collect(stack.client.generate("hi", model="gpt-9"))
        assert worker.requests == []
        _, text, _ = await collect(stack.client.generate("hi", model="tiny"))
        assert text == "a"


@pytest.mark.parametrize("method", ["Generate", "Cancel"])
@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xff", id="unfinished tag"),
        pytest.param(b"\x0a\xff\xff\xff\xff\x7f", id="size beyond the end"),
        pytest.param(b"\x0a\x02\xff\xfe", id="not UTF-8"),
    ],
)
async def test_malformed_bytes_are_an_invalid_argument(method: str, raw: bytes) -> None:
    async with scripted(says("a")) as (stack, (worker,)):
        code, details = await stack.send(method, raw)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith(f"request body is {len(raw)} bytes that can't be read, but must be a protobuf mess")
        assert worker.requests == []


async def test_fuzzed_bytes_never_get_more_than_a_refusal_or_an_answer() -> None:
    allowed = {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}
    good = tandem_pb2.GenerateRequest(
        text="hello", sampling=tandem_pb2.SamplingParams(max_tokens=3, temperature=0, stop=["x"]), request_id="a"
    ).SerializeToString()
    mutated = st.tuples(st.integers(0, len(good) - 1), st.binary(max_size=4)).map(
        lambda change: good[: change[0]] + change[1] + good[change[0] + 1 :]
    )
    samples: list[bytes] = []

    @settings(max_examples=300, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.binary(max_size=64) | mutated)
    def gather(raw: bytes) -> None:
        samples.append(raw)

    gather()
    async with scripted(says("a")) as (stack, _):
        for raw in samples:
            code, details = await stack.send("Generate", raw)
            assert code in allowed, f"{raw!r} got {code}: {details}"
            assert "Traceback" not in details and "Error" not in details
        _, text, _ = await collect(stack.client.generate("hi"))
        assert text == "a"


async def test_a_message_over_the_size_limit_is_refused_and_the_gateway_lives() -> None:
    async with scripted(says("a")) as (stack, _):
        raw = tandem_pb2.GenerateRequest(text="a" * (17 * 2**20)).SerializeToString()
        code, _ = await stack.send("Generate", raw)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        _, text, _ = await collect(stack.client.generate("hi"))
        assert text == "a"


async def test_health_and_reflection_name_the_service() -> None:
    async with scripted(says("a")) as (stack, _), grpc.aio.insecure_channel(stack.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "tandem.v1.TandemService"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="tandem.v1.TandemService"),
        ]
        listed, described = [answer async for answer in reflection.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {
            "tandem.v1.TandemService", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection",
        }  # fmt: skip
        assert b"tandem/v1/tandem.proto" in described.file_descriptor_response.file_descriptor_proto[0]


async def test_draining_says_not_serving_and_lets_a_running_request_end() -> None:
    release = asyncio.Event()

    async def slow(request: Any, context: Any) -> Any:
        async for response in says("a", "b")(request, context):
            yield response
            await release.wait()

    async with scripted(slow) as (stack, _), grpc.aio.insecure_channel(stack.address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream = stack.client.generate("hi")
        await anext(stream)
        stopping = asyncio.create_task(stack.gateway.stop(grace_s=10))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        release.set()
        assert [response.WhichOneof("event") async for response in stream] == ["delta", "completion"]
        await stopping


async def test_models_and_status() -> None:
    async with scripted(says("a"), says("b")) as (stack, _):
        (model,) = await stack.client.models()
        assert (model.name, model.max_len, model.vocab_size) == ("tiny", 512, 2048)
        assert not model.HasField("lookahead_span") and not model.HasField("draft")
        status = await stack.client.status()
        assert [worker.worker_id for worker in status.workers] == ["worker-0", "worker-1"]
        worker = status.workers[0]
        assert worker.state == tandem_pb2.WORKER_STATE_READY
        assert (worker.running_requests, worker.waiting_requests) == (1, 2)
        (pool,) = worker.pools
        assert (pool.name, pool.block_size, pool.total_blocks, pool.bytes) == ("target", 16, 64, 4096)
        assert (pool.free_blocks, pool.cached_blocks, pool.in_use_blocks) == (60, 3, 1)
        assert status.directory_up


async def test_a_placement_is_explained_and_an_unknown_one_refused_in_a_sentence() -> None:
    cost = {"target_prefill": 5.0, "queue": 0.5}
    told = Explanation("r1", 2.5, 40, "worker-0", (PricedWorker("worker-0", 32, None, cost),), {"worker-1": "full"})
    async with scripted(says("a")) as (stack, _):
        stack.dispatcher.explanations = (told,)
        (decision,) = await stack.client.explain("r1")
        assert (decision.worker_id, decision.age_s, decision.prompt_tokens) == ("worker-0", 2.5, 40)
        (candidate,) = decision.candidates
        assert candidate.target_tokens == 32
        assert not candidate.HasField("draft_tokens")
        assert {term.name: term.ms for term in candidate.cost} == cost
        assert [(each.worker_id, each.reason) for each in decision.passed_over] == [("worker-1", "full")]
        with pytest.raises(InvalidRequest, match="request_id is nobody, but must be that of one of your requests"):
            await stack.client.explain("nobody")


async def test_the_target_worker_and_the_tenant_reach_the_scheduler() -> None:
    async with scripted(says("a")) as (stack, _):
        await collect(stack.client.generate("hi", worker_id="worker-0"))
        await collect(stack.client.generate("hi"))
        assert [query.worker_id for query in stack.dispatcher.queries] == ["worker-0", ""]
        with pytest.raises(InvalidRequest, match="worker_id is two words"):
            await collect(stack.client.generate("hi", worker_id="two words"))


async def test_what_was_reused_is_compared_with_what_the_placement_expected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with scripted(says("a")) as (stack, _):
        for expected in (0, 16, 48):  # and the scripted worker says that it reused nothing
            stack.dispatcher.expected = Frontier(expected, None, expected)
            await collect(stack.client.generate([1] * 50))
        routing = (await stack.client.status()).routing
        assert (routing.requests, routing.equal, routing.too_high_tokens, routing.too_low_tokens) == (3, 1, 64, 0)
    assert "route_predicted_minus_actual_tokens=48" in caplog.text


KEYED = {"red": digest_of("key-red")}


async def test_with_keys_every_method_but_health_needs_one() -> None:
    service = tandem_pb2.DESCRIPTOR.services_by_name["TandemService"]
    async with gateway([], tenants=Tenants(KEYED)) as stack, grpc.aio.insecure_channel(stack.address) as channel:
        methods = [f"/{service.full_name}/{method.name}" for method in service.methods]
        for name in [*methods, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/no.Such/Method"]:
            for key in ((), (("authorization", "Bearer wrong"),)):
                call = channel.stream_stream(name)(iter([b""]), metadata=key)
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED, name
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with TandemClient(stack.address, api_key="key-red") as client:
            assert len(await client.models()) == 1
        with pytest.raises(Unauthenticated):
            await stack.client.status()


async def test_a_key_that_cannot_be_a_header_is_refused_without_repeating_it() -> None:
    with pytest.raises(InvalidRequest, match="api_key") as caught:
        TandemClient("127.0.0.1:1", api_key="key-red\n")
    assert "key-red" not in str(caught.value)


async def test_tenants_share_neither_keys_of_blocks_nor_ids_of_requests() -> None:
    tenants = Tenants({"red": digest_of("key-red"), "blue": digest_of("key-blue")})
    async with (
        scripted(says("a")) as (plain, (worker,)),
        gateway(plain.dispatcher.workers, tenants=tenants) as stack,
    ):
        for key in ("key-red", "key-blue", "key-red"):
            async with TandemClient(stack.address, api_key=key) as client:
                await collect(client.generate([7] * 40, request_id="same"))
        first, other, again = (set(query.keys) for query in stack.dispatcher.queries)
        assert len(first) == 2
        assert first.isdisjoint(other)
        assert first == again
        salts = [request.tenant_salt for request in worker.requests]
        assert salts[0] == salts[2] != salts[1]
