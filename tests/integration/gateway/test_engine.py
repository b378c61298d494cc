"""The whole path over real gRPC with a real engine: gateway, worker service, engine loop, tiny model with its draft."""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from cluster.core.frontier import Frontier
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.loop import EngineLoop
from cluster.errors import DeadlineExceeded, InvalidRequest, StaleEpoch, TandemError, Unauthenticated
from cluster.gateway.auth import Tenants, digest_of
from cluster.gateway.served import ServedModel
from cluster.gateway.worker_client import WorkerClients
from cluster.routing.packed_keys import PackedKeys
from cluster.routing.types import Placement
from cluster.rpc._generated.tandem.internal.v1 import worker_pb2
from cluster.rpc._generated.tandem.v1 import tandem_pb2
from cluster.rpc.client import TandemClient
from cluster.rpc.server import RpcServer
from cluster.rpc.worker_service import WorkerService
from tests.fixtures.prompts import TINY_EAGLE3, TINY_TARGET
from tests.integration.gateway.harness import (
    CARD,
    WORKER_SERVICE,
    Stack,
    collect,
    eventually,
    gateway,
    tokenizer,
    worker_info,
)

EPOCH = 7
PROMPT = [{"role": "user", "content": "what is the code of the red box?"}]


@pytest.fixture(scope="module")
def loop() -> Iterator[EngineLoop]:
    """One engine for this module; each test leaves its pools as it found them, but for what is cached."""
    config = EngineConfig(
        model=TINY_TARGET, draft=TINY_EAGLE3, method="eagle3", kv_bytes=8 << 20, max_batch=4, max_len=512, threads=1
    )
    engine_loop = EngineLoop(Engine(config))
    engine_loop.start()
    yield engine_loop
    engine_loop.shutdown()


@asynccontextmanager
async def worker(loop: EngineLoop) -> AsyncGenerator[str, None]:
    server = RpcServer({WORKER_SERVICE: WorkerService(loop, EPOCH)})
    yield await server.start()
    await server.stop()


@asynccontextmanager
async def edge(loop: EngineLoop, tenants: Tenants | None = None) -> AsyncGenerator[Stack, None]:
    """A gateway and a worker service around the engine."""
    parts = await loop.call(lambda engine: engine.parts)
    card = replace(CARD, fingerprint=parts.target.fingerprint, vocab_size=parts.target.vocab_size)
    served = ServedModel(card, tokenizer(), pools=())
    async with worker(loop) as address, gateway([worker_info("worker-0", address, EPOCH)], served, tenants) as stack:
        yield stack


@pytest.fixture
async def stack(loop: EngineLoop) -> AsyncGenerator[Stack, None]:
    async with edge(loop) as stack:
        yield stack


def idle(loop: EngineLoop) -> bool:
    """Whether no request runs or waits and no block is held."""
    stats = loop.stats()
    held = any(meters.in_use or meters.reserved for meters in stats.pools.values())
    return not (stats.running or stats.waiting or held)


async def test_a_chat_streams_tokens_text_and_a_full_account(stack: Stack, loop: EngineLoop) -> None:
    tokens, text, last = await collect(stack.client.generate(PROMPT, max_tokens=24, temperature=0, ignore_eos=True))
    assert len(tokens) == 24
    assert text == tokenizer().decode(tokens)
    assert last.finish_reason == tandem_pb2.FINISH_REASON_LENGTH
    assert last.usage.completion_tokens == 24
    assert last.usage.prompt_tokens > 10
    assert last.speculation.drafted_tokens >= last.speculation.accepted_tokens >= 0
    assert last.speculation.steps > 0
    assert last.speculation.mean_acceptance_length >= 1
    assert last.worker_id == "worker-0"
    await eventually(lambda: idle(loop))


async def test_the_same_again_reuses_both_pools_and_says_the_same(stack: Stack) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    prompt = list(range(100, 180))
    first, _, cold = await collect(stack.client.generate(prompt, **options))
    second, _, warm = await collect(stack.client.generate(prompt, **options))
    plain, _, last = await collect(stack.client.generate(prompt, speculate=False, reuse=False, **options))
    assert first == second == plain
    assert cold.reuse.joint_tokens == 0
    assert warm.reuse.joint_tokens == 79
    assert warm.reuse.target_tokens >= 79 and warm.reuse.draft_tokens >= 79
    assert (last.reuse.target_tokens, last.speculation.steps) == (0, 0)


async def test_a_tenant_reuses_its_own_kv_and_no_other_tenants(loop: EngineLoop) -> None:
    tenants = Tenants({"red": digest_of("key-red"), "blue": digest_of("key-blue")})
    reused: list[int] = []
    answers: list[list[int]] = []
    async with edge(loop, tenants) as stack:
        for key in ("key-red", "key-blue", "key-blue"):
            async with TandemClient(stack.address, key) as client:
                tokens, _, last = await collect(client.generate(list(range(500, 580)), max_tokens=8, temperature=0))
            reused.append(last.reuse.joint_tokens)
            answers.append(tokens)
        with pytest.raises(Unauthenticated):
            await collect(stack.client.generate("hi"))
    assert reused == [0, 0, 79]
    assert answers[0] == answers[1] == answers[2]


async def test_text_chat_and_tokens_of_one_prompt_are_one_prompt(stack: Stack) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
    text = "<|user|>what is the code of the red box?<|end|><|assistant|>"
    answers = [await collect(stack.client.generate(prompt, **options)) for prompt in (PROMPT, text)]
    assert answers[0][:2] == answers[1][:2]


async def test_a_seed_makes_sampling_repeatable(stack: Stack) -> None:
    async def sample(seed: int) -> list[int]:
        options: dict[str, Any] = {"max_tokens": 16, "temperature": 1.5, "seed": seed, "ignore_eos": True}
        return (await collect(stack.client.generate(PROMPT, **options)))[0]

    assert await sample(5) == await sample(5)
    assert await sample(5) != await sample(6)


async def test_a_stop_string_ends_the_text_before_it(stack: Stack) -> None:
    options: dict[str, Any] = {"max_tokens": 32, "temperature": 0, "ignore_eos": True}
    _, text, _ = await collect(stack.client.generate(PROMPT, **options))
    stop = text[5:8]
    _, cut, last = await collect(stack.client.generate(PROMPT, stop=[stop], **options))
    assert cut == text[: text.index(stop)]
    assert last.finish_reason == tandem_pb2.FINISH_REASON_STOP


async def test_logprobs_come_with_every_token(stack: Stack) -> None:
    entries: list[tandem_pb2.TokenLogprobs] = []
    tokens: list[int] = []
    async for response in stack.client.generate(PROMPT, max_tokens=8, temperature=0, logprobs=3, ignore_eos=True):
        entries.extend(response.delta.logprobs)
        tokens.extend(response.delta.token_ids)
    assert [entry.token_id for entry in entries] == tokens
    for entry in entries:
        assert len(entry.top) == 3
        assert entry.top[0].token_id == entry.token_id
        assert entry.logprob == pytest.approx(entry.top[0].logprob)
        assert entry.logprob <= 0


async def test_eight_at_once_say_what_each_says_alone(stack: Stack) -> None:
    prompts = [[300 + number, *range(200, 230)] for number in range(8)]
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
    together = await asyncio.gather(*(collect(stack.client.generate(prompt, **options)) for prompt in prompts))
    alone = [await collect(stack.client.generate(prompt, **options)) for prompt in prompts]
    assert [answer[0] for answer in together] == [answer[0] for answer in alone]


async def test_leaving_a_stream_frees_its_blocks(stack: Stack, loop: EngineLoop) -> None:
    before = loop.stats().generated
    stream = stack.client.generate(PROMPT, max_tokens=400, ignore_eos=True)
    await anext(stream)
    assert not idle(loop)
    await stream.aclose()
    await eventually(lambda: idle(loop))
    assert loop.stats().generated - before < 400


async def test_closing_the_connection_frees_blocks(stack: Stack, loop: EngineLoop) -> None:
    before = loop.stats().generated
    streams = [stack.client.generate(PROMPT, max_tokens=400, ignore_eos=True) for _ in range(3)]
    await asyncio.gather(*(anext(stream) for stream in streams))
    await stack.client.close()
    await eventually(lambda: idle(loop) and stack.gateway.active_requests == 0)
    assert loop.stats().generated - before < 3 * 400


async def test_cancelling_by_id_ends_the_stream_with_a_completion_and_frees_blocks(
    stack: Stack, loop: EngineLoop
) -> None:
    responses = []
    async for response in stack.client.generate(PROMPT, request_id="mine", max_tokens=400, ignore_eos=True):
        if not responses:
            assert await stack.client.cancel("mine")
        responses.append(response)
    last = responses[-1].completion
    assert last.finish_reason == tandem_pb2.FINISH_REASON_CANCELLED
    assert 0 < last.usage.completion_tokens < 400
    await eventually(lambda: idle(loop))
    assert not await stack.client.cancel("mine")


async def test_a_queued_request_can_be_cancelled(stack: Stack, loop: EngineLoop) -> None:
    running = [stack.client.generate(PROMPT, max_tokens=400, ignore_eos=True) for _ in range(4)]
    await asyncio.gather(*(anext(stream) for stream in running))
    queued = asyncio.create_task(collect(stack.client.generate(PROMPT, request_id="late", max_tokens=4)))
    await eventually(lambda: loop.stats().waiting == 1)
    assert await stack.client.cancel("late")
    tokens, text, last = await queued
    assert (tokens, text, last.finish_reason) == ([], "", tandem_pb2.FINISH_REASON_CANCELLED)
    for stream in running:
        await stream.aclose()
    await eventually(lambda: idle(loop))


async def test_a_deadline_frees_blocks(stack: Stack, loop: EngineLoop) -> None:
    with pytest.raises(DeadlineExceeded):
        await collect(stack.client.generate(PROMPT, max_tokens=480, ignore_eos=True, timeout_s=0.2))
    await eventually(lambda: idle(loop))


async def test_bad_input_allocates_nothing_and_the_next_request_works(stack: Stack, loop: EngineLoop) -> None:
    await eventually(lambda: idle(loop))
    before = loop.stats()
    bad: list[dict[str, Any]] = [{"max_tokens": 0}, {"max_tokens": 2**63}, {"temperature": float("nan")}, {"top_k": 0}]
    for fields in bad:
        with pytest.raises(InvalidRequest):
            await collect(stack.client.generate("hi", **fields))
    with pytest.raises(InvalidRequest):
        await collect(stack.client.generate([5000]))
    assert loop.stats() == before
    tokens, _, _ = await collect(stack.client.generate("hi", max_tokens=3, temperature=0, ignore_eos=True))
    assert len(tokens) == 3


async def test_an_answer_takes_the_form_that_is_asked_for(stack: Stack, loop: EngineLoop) -> None:
    schema = '{"properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false}'
    form = {"json_schema": schema.replace("{", '{"type": "object", ', 1)}
    _, text, last = await collect(stack.client.generate(PROMPT, max_tokens=24, structured_output=form))
    assert json.loads(text)["ok"] in (True, False)
    assert last.finish_reason == tandem_pb2.FINISH_REASON_STOP
    for wrong in ({"regex": "a(b"}, {"json_schema": "{}}"}, {"ebnf": "start: nothing"}, {}):
        with pytest.raises(InvalidRequest, match="structured_output"):
            await collect(stack.client.generate(PROMPT, max_tokens=4, structured_output=wrong))
    await eventually(lambda: idle(loop))


async def test_a_form_that_takes_too_long_to_compile_keeps_nobody_waiting(stack: Stack, loop: EngineLoop) -> None:
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}$"} for i in range(20, 40)]
    form = {"json_schema": json.dumps({"allOf": patterns})}
    slow = asyncio.create_task(collect(stack.client.generate(PROMPT, max_tokens=4, structured_output=form)))
    await eventually(lambda: len(stack.dispatcher.queries) == 1)
    tokens, _, _ = await collect(stack.client.generate(PROMPT, max_tokens=20, ignore_eos=True))
    assert len(tokens) == 20
    assert not slow.done()
    with pytest.raises(InvalidRequest, match="too much time or memory"):
        await slow
    await eventually(lambda: idle(loop))


async def test_a_worker_refuses_an_earlier_lifes_requests_and_what_cannot_fit(loop: EngineLoop) -> None:
    clients = WorkerClients()
    async with worker(loop) as address:
        placement = Placement("worker-0", EPOCH, address, Frontier(0, None, 0))

        async def send(epoch: int, prompt: list[int], max_tokens: int) -> None:
            sampling = tandem_pb2.SamplingParams(max_tokens=max_tokens)
            request = worker_pb2.GenerateRequest(epoch=epoch, request_id="a", prompt=prompt, sampling=sampling)
            async for _ in clients.generate(placement, request, None):
                pass

        with pytest.raises(StaleEpoch) as caught:
            await send(EPOCH - 1, [1, 2, 3], 4)
        assert (caught.value.requested, caught.value.current) == (EPOCH - 1, EPOCH)
        with pytest.raises(TandemError, match="600 tokens long"):
            await send(EPOCH, [1] * 600, 4)
        await clients.close()
    assert idle(loop)


async def test_routing_keys_are_the_keys_that_the_worker_reports(stack: Stack, loop: EngineLoop) -> None:
    await loop.call(lambda engine: engine.drain_changes())
    prompt = list(range(400, 464))
    await collect(stack.client.generate(prompt, max_tokens=2, temperature=0))
    changes = await loop.call(lambda engine: engine.drain_changes())
    stored = set(PackedKeys.of(block.key for block in changes.stored))
    assert len(stack.dispatcher.queries[-1].keys) == 4
    assert set(stack.dispatcher.queries[-1].keys) <= stored
