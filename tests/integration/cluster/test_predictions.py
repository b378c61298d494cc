"""Four workers in a steady load of conversations: reuse is what the scheduler predicted, and more than by chance."""

from __future__ import annotations

import asyncio
import random
import re
import signal
from collections.abc import Iterator, Sequence
from statistics import mean

import pytest

from cluster.errors import InvalidRequest
from cluster.rpc.client import TandemClient
from tests.fixtures.prompts import TINY_TARGET
from tests.integration.cli_process import EAGLE3, TandemProcess, eventually
from tests.support.cluster import Answer, ask, fresh_prompt

pytestmark = pytest.mark.ray

WORKERS = 4
CHATS, TURNS, AT_ONCE = 8, 6, 2


@pytest.fixture(scope="module")
def four_workers() -> Iterator[str]:
    """The endpoint of a cluster with processes of its own: a process can be part of one Ray instance only."""
    options = ("--port", "0", "--workers", str(WORKERS), "--kv-cache-bytes", "16MiB", "--max-batch", "2")
    serve = TandemProcess("serve", str(TINY_TARGET), "--speculative-config", EAGLE3, *options, "--chunk", "64")
    try:
        printed = serve.wait_for("(tandem.v1.TandemService")
        yield re.findall(r"grpc://(\S+)", printed)[0]
        assert serve.end(signal.SIGINT) == 130, serve.output
        assert eventually(lambda: not serve.family())
    finally:
        serve.kill()


async def chat(client: TandemClient, opening: list[int], rng: random.Random | None) -> list[Answer]:
    """Turns that follow each other, each with the whole conversation as its prompt. With `rng`, on a worker picked by
    it instead of the scheduler."""
    said, answers = opening, []
    for turn in range(TURNS):
        worker = f"worker-{rng.randrange(WORKERS)}" if rng is not None else ""
        answer = await ask(client, said, max_tokens=16, worker_id=worker)
        answers.append(answer)
        said = [*said, *answer.tokens, *(20 + (turn * 31 + place) % 900 for place in range(24))]
    return answers


async def steady_load(client: TandemClient, rng: random.Random | None = None) -> list[Answer]:
    """All answers of some conversations, two at a time."""
    openings = iter([fresh_prompt(500) for _ in range(CHATS)])
    answers: list[Answer] = []

    async def talk() -> None:
        for opening in openings:
            answers.extend(await chat(client, opening, rng))

    await asyncio.gather(*(talk() for _ in range(AT_ONCE)))
    return answers


def reuse_of(answers: Sequence[Answer]) -> float:
    """Share of the prompt tokens that both pools held already."""
    return sum(each.reused for each in answers) / sum(each.completion.usage.prompt_tokens for each in answers)


def ttft_of(answers: Sequence[Answer]) -> float:
    """Mean seconds to the first token."""
    return mean(each.completion.timings.time_to_first_token_s for each in answers)


async def test_predicted_reuse_is_measured_reuse_and_beats_random_routing(four_workers: str) -> None:
    async with TandemClient(four_workers) as client:
        routed = await steady_load(client)
        accuracy = (await client.status()).routing
        assert accuracy.requests == CHATS * TURNS
        assert accuracy.equal >= 0.95 * accuracy.requests, accuracy
        by_chance = await steady_load(client, random.Random(1))
        figures = ", ".join(f"reuse {reuse_of(each):.3f}, TTFT {ttft_of(each):.4f} s" for each in (routed, by_chance))
        print(f"routed, by chance: {figures}; predictions right: {accuracy.equal} of {accuracy.requests}")
        assert reuse_of(routed) > 1.2 * reuse_of(by_chance), figures


async def test_a_placement_explains_itself(four_workers: str) -> None:
    async with TandemClient(four_workers) as client:
        answer = await ask(client, fresh_prompt(), request_id="explained")
        (decision,) = await client.explain("explained")
        assert decision.worker_id == answer.worker
        assert {each.worker_id for each in decision.candidates} == {f"worker-{number}" for number in range(WORKERS)}
        totals = {each.worker_id: sum(term.ms for term in each.cost) for each in decision.candidates}
        assert totals[answer.worker] == min(totals.values())
        with pytest.raises(InvalidRequest, match="request_id is forgotten"):
            await client.explain("forgotten")


async def test_a_request_may_name_its_worker(four_workers: str) -> None:
    async with TandemClient(four_workers) as client:
        prompt = fresh_prompt()
        answers = [await ask(client, prompt, worker_id=f"worker-{number}") for number in range(WORKERS)]
        assert [each.worker for each in answers] == [f"worker-{number}" for number in range(WORKERS)]
