"""The directory on a real server: leases, anchors, lost and foreign data, a server that dies."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
import redis
from pydantic import SecretStr

from cluster.directory.breaker import Breaker, DirectoryDown
from cluster.directory.embedded import EmbeddedRedis
from cluster.directory.schema import (
    AnchorHolder,
    Schema,
    pack_holders,
    pack_worker,
    unpack_holders,
    unpack_worker,
    worker_tag,
)
from cluster.directory.store import Directory, check_url
from cluster.errors import ConfigError
from cluster.routing.prefix_map import Depth
from cluster.routing.types import PoolSize
from tests.unit.routing.builders import chain, worker

SCHEMA = Schema(prefix="test", anchor_every=4)
PROMPT = chain(*range(14))


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.url.get_secret_value()) as connected:
        connected.flushall()
        yield connected


@pytest.fixture
async def directory(server: EmbeddedRedis, client: redis.Redis) -> AsyncIterator[Directory]:
    opened = Directory(server.url, SCHEMA, lease_s=30.0, breaker=Breaker(failures_to_open=100))
    yield opened
    await opened.close()


def holder(name: str, epoch: int, target: int, draft: int) -> AnchorHolder:
    return AnchorHolder(worker_tag(name), epoch, target, draft)


async def test_workers_are_found_while_their_lease_is_valid(directory: Directory, client: redis.Redis) -> None:
    a, b = worker("a", epoch=3), replace(worker("b"), pools=(PoolSize("target", 8, 16, 4096, 0),))
    assert await directory.announce([a, b]) == {"a", "b"}
    assert await directory.announce([a, b]) == set(), "both were known"
    assert sorted(await directory.workers(), key=lambda info: info.worker_id) == [a, b]
    client.delete(SCHEMA.worker_key("a"))  # as when the lease runs out
    assert await directory.workers() == [b]
    await directory.forget("b")
    assert await directory.workers() == []


async def test_a_lease_ends_by_itself(server: EmbeddedRedis, client: redis.Redis) -> None:
    directory = Directory(server.url, SCHEMA, lease_s=0.05)
    await directory.announce([worker("a")])
    async with asyncio.timeout(5):
        while await directory.workers():
            await asyncio.sleep(0.01)
    await directory.close()


async def test_a_flush_shows_in_the_next_announcement(directory: Directory, client: redis.Redis) -> None:
    await directory.announce([worker("a")])
    client.flushall()
    assert await directory.announce([worker("a")]) == {"a"}


async def test_hints_give_each_life_its_deepest_anchor_per_pool(directory: Directory) -> None:
    a, b = worker("a", epoch=2), worker("b", epoch=5)
    await directory.put_anchors(
        {
            PROMPT[3]: [holder("a", 2, 4, 4), holder("b", 5, 4, 0)],
            PROMPT[7]: [holder("a", 2, 8, 0), holder("b", 4, 8, 8), holder("gone", 1, 8, 8)],
        }
    )
    assert await directory.hints(PROMPT, [a, b]) == {("a", 2): Depth(8, 4), ("b", 5): Depth(4, 0)}
    assert await directory.hints(PROMPT[:3], [a, b]) == {}, "shorter than one anchor"
    await directory.put_anchors({PROMPT[7]: []})
    assert await directory.hints(PROMPT, [a]) == {("a", 2): Depth(4, 4)}


async def test_many_anchors_are_written_in_batches(directory: Directory, client: redis.Redis) -> None:
    keys = chain(*range(1500))
    await directory.put_anchors({key: [holder("a", 1, 4, 4)] for key in keys})
    assert client.dbsize() == 1500
    assert client.ttl(SCHEMA.anchor_key(keys[-1])) > 0, "nothing stays for ever"


async def test_foreign_data_is_skipped(directory: Directory, client: redis.Redis) -> None:
    await directory.announce([worker("a")])
    client.sadd(SCHEMA.workers_key, "x", "y")
    client.set(SCHEMA.worker_key("x"), b'{"worker_id": 7}')
    client.set(SCHEMA.anchor_key(PROMPT[3]), b"not a multiple of a record")
    assert await directory.workers() == [worker("a")]
    assert await directory.hints(PROMPT, [worker("a")]) == {}


def test_all_keys_of_a_cluster_share_one_hash_slot() -> None:
    names = [SCHEMA.workers_key, SCHEMA.worker_key("a"), SCHEMA.anchor_key(PROMPT[0])]
    assert all(name.startswith("{test}:") for name in names)


def test_values_survive_the_round_trip() -> None:
    info = replace(worker("a", epoch=2**63), pools=(PoolSize("target", 8, 16, 4096, 0), PoolSize("draft", 8, 16, 9, 1)))
    assert unpack_worker(pack_worker(info)) == info
    holders = [holder("a", 2**63, 4096, 0), holder("b", 1, 1, 1)]
    assert unpack_holders(pack_holders(holders)) == holders


async def test_a_dead_server_is_an_answer_within_the_limit() -> None:
    with EmbeddedRedis() as own:
        directory = Directory(own.url, SCHEMA, lease_s=30.0)
        await directory.announce([worker("a")])
        own.stop()
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(20):
            with pytest.raises(DirectoryDown):
                await directory.hints(PROMPT, [worker("a")])
        assert loop.time() - began < 2.0
        assert not directory.up
        await directory.close()


async def test_a_hanging_server_is_an_answer_within_the_limit() -> None:
    with EmbeddedRedis() as own:
        directory = Directory(own.url, SCHEMA, lease_s=30.0)
        await directory.announce([worker("a")])
        os.kill(own.pid, signal.SIGSTOP)
        try:
            loop = asyncio.get_running_loop()
            began = loop.time()
            for _ in range(20):
                with pytest.raises(DirectoryDown):
                    await directory.hints(PROMPT, [worker("a")])
            assert loop.time() - began < 2.0
        finally:
            os.kill(own.pid, signal.SIGCONT)
        await directory.close()


def test_a_wrong_password_is_a_clear_error_that_does_not_repeat_it(
    client: redis.Redis, server: EmbeddedRedis, caplog: pytest.LogCaptureFixture
) -> None:
    client.config_set("requirepass", "right")
    try:
        with caplog.at_level(logging.DEBUG), pytest.raises(ConfigError) as refused:
            check_url(SecretStr(f"unix://:hunter2@{server.socket_path}"))
        check_url(SecretStr(f"unix://:right@{server.socket_path}"))
    finally:
        client.config_set("requirepass", "")
    assert "redis_url" in str(refused.value)
    assert "hunter2" not in str(refused.value) + caplog.text


def test_a_server_that_is_down_at_start_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    check_url(SecretStr("unix:///nowhere/at/all"))
    assert "directory_down" in caplog.text


def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        check_url(SecretStr("localhost 6379"))
