"""Redis holds hints: flushed, killed or hanging in the middle of a run, it costs at most the hit rate."""

import os
import signal
from contextlib import aclosing

import pytest
import redis

from actors.cluster import RunningCluster
from cluster.directory.embedded import EmbeddedRedis
from cluster.rpc.client import TandemClient
from tests.support.cluster import ask, collect, eventually, fresh_prompt, is_healthy, settled

pytestmark = pytest.mark.ray


@pytest.fixture
def server(running_cluster: RunningCluster) -> EmbeddedRedis:
    assert running_cluster.redis is not None
    return running_cluster.redis


def keys(server: EmbeddedRedis, pattern: str) -> set[bytes]:
    with redis.Redis.from_url(server.url.get_secret_value()) as client:
        return set(client.keys(pattern))


def flush(server: EmbeddedRedis) -> None:
    with redis.Redis.from_url(server.url.get_secret_value()) as client:
        client.flushall()


async def test_the_directory_holds_leases_and_anchors_and_recovers_from_a_flush(
    running_cluster: RunningCluster, client: TandemClient, server: EmbeddedRedis
) -> None:
    flush(server)  # with it go the anchors of workers that other tests have killed
    await settled(running_cluster)
    prompt = fresh_prompt()
    expected = await ask(client, prompt, max_tokens=300)
    await eventually(lambda: len(keys(server, "*:anchor:*")) >= len(expected.tokens) // 32, "anchors are written")
    await eventually(lambda: len(keys(server, "*:worker:*")) == 2, "leases are written")
    anchors = keys(server, "*:anchor:*")

    stream = client.generate(prompt, max_tokens=300, temperature=0.0, ignore_eos=True, timeout_s=60)
    async with aclosing(stream):
        begun = await anext(stream)
        flush(server)
        tokens = list(begun.delta.token_ids)
        async for response in stream:
            tokens += response.delta.token_ids
    assert tuple(tokens) == expected.tokens
    assert (await ask(client, prompt, max_tokens=300)).tokens == expected.tokens
    await eventually(
        lambda: len(keys(server, "*:worker:*")) == 2 and keys(server, "*:anchor:*") >= anchors,
        "the directory is filled again",
    )


async def test_a_killed_redis_fails_no_request(
    running_cluster: RunningCluster, client: TandemClient, server: EmbeddedRedis
) -> None:
    await settled(running_cluster)
    prompt = fresh_prompt()
    expected = await ask(client, prompt)
    os.kill(server.pid, signal.SIGKILL)
    for _ in range(5):
        assert (await ask(client, prompt)).tokens == expected.tokens
    await eventually(lambda: len(keys(server, "*:worker:*")) == 2, "its replacement is filled")


async def test_a_hanging_redis_fails_and_delays_no_request(
    running_cluster: RunningCluster, client: TandemClient, server: EmbeddedRedis
) -> None:
    await settled(running_cluster)
    prompt = fresh_prompt()
    expected = await ask(client, prompt)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        await eventually(lambda: not running_cluster.state().directory_up, "the scheduler notices")
        for _ in range(5):
            answer = await ask(client, prompt)
            assert answer.tokens == expected.tokens
            assert answer.reused > 0, "the scheduler goes on from its own picture"
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await eventually(lambda: is_healthy(running_cluster), "the scheduler reaches it again")


async def test_no_dispatch_needs_redis_after_the_scheduler_died_either(
    running_cluster: RunningCluster, client: TandemClient, server: EmbeddedRedis
) -> None:
    await settled(running_cluster)
    prompt = fresh_prompt()
    expected = await ask(client, prompt)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        scheduler = next(each for each in running_cluster.members() if each.name == "tandem-scheduler")
        assert scheduler.pid is not None
        os.kill(scheduler.pid, signal.SIGKILL)
        stream = client.generate(prompt, max_tokens=16, temperature=0.0, ignore_eos=True, timeout_s=60)
        assert (await collect(stream)).tokens == expected.tokens
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await eventually(lambda: is_healthy(running_cluster), "the cluster is whole again")
