"""The breaker: bounded waits, no traffic while open, one probe at a time."""

import asyncio
import logging

import pytest
from redis.exceptions import AuthenticationError, ConnectionError

from cluster.directory.breaker import Breaker, BreakerState, DirectoryDown


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = ConnectionError("down")

    async def ask(self) -> str:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return "answer"


async def fail(breaker: Breaker, server: Server) -> None:
    with pytest.raises(DirectoryDown):
        await breaker.call(server.ask, limit_s=1.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(failures_to_open=3, open_s=1.0, max_open_s=4.0, clock=clock)


async def test_it_opens_after_failures_in_a_row_and_then_asks_nobody(breaker: Breaker) -> None:
    server = Server()
    for _ in range(3):
        assert breaker.state is BreakerState.CLOSED
        await fail(breaker, server)
    assert breaker.state is BreakerState.OPEN
    await fail(breaker, server)
    assert server.asked == 3


async def test_a_success_between_failures_starts_the_count_again(breaker: Breaker) -> None:
    server = Server()
    for error in (ConnectionError(), ConnectionError(), None, ConnectionError(), ConnectionError()):
        server.error = error
        if error is None:
            assert await breaker.call(server.ask, limit_s=1.0) == "answer"
        else:
            await fail(breaker, server)
    assert breaker.state is BreakerState.CLOSED


async def test_the_probe_decides_and_each_failed_one_doubles_the_wait(breaker: Breaker, clock: Clock) -> None:
    server = Server()
    for _ in range(3):
        await fail(breaker, server)
    for wait in (1.0, 2.0, 4.0, 4.0):
        clock.now += wait - 0.01
        assert breaker.state is BreakerState.OPEN
        clock.now += 0.02
        assert breaker.state is BreakerState.HALF_OPEN
        await fail(breaker, server)
    server.error = None
    clock.now += 4.01
    assert await breaker.call(server.ask, limit_s=1.0) == "answer"
    assert breaker.state is BreakerState.CLOSED


async def test_only_one_probe_at_a_time(breaker: Breaker, clock: Clock) -> None:
    server = Server()
    for _ in range(3):
        await fail(breaker, server)
    clock.now += 1.01
    release = asyncio.Event()

    async def probe() -> str:
        await release.wait()
        return "answer"

    probing = asyncio.create_task(breaker.call(probe, limit_s=5.0))
    await asyncio.sleep(0)
    await fail(breaker, server)
    assert server.asked == 3
    release.set()
    assert await probing == "answer"


async def test_a_slow_answer_is_cut_off(breaker: Breaker) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(DirectoryDown):
        await breaker.call(hang, limit_s=0.02)
    assert loop.time() - began < 1.0


async def test_what_the_server_said_is_neither_logged_nor_passed_on(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server()
    server.error = AuthenticationError("redis://user:hunter2@host")
    with caplog.at_level(logging.DEBUG):
        for _ in range(3):
            with pytest.raises(DirectoryDown) as caught:
                await breaker.call(server.ask, limit_s=1.0)
            assert "hunter2" not in str(caught.value)
            assert caught.value.__cause__ is None
    assert "hunter2" not in caplog.text
    assert "directory_down" in caplog.text


async def test_a_defect_of_the_caller_is_not_the_servers_failure(breaker: Breaker) -> None:
    server = Server()
    server.error = TypeError("a defect")
    for _ in range(5):
        with pytest.raises(TypeError):
            await breaker.call(server.ask, limit_s=1.0)
    assert breaker.state is BreakerState.CLOSED
