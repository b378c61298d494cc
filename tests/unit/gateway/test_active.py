"""Requests that run: unique ids per tenant, and cancelling before and after a worker has them."""

import pytest

from cluster.errors import InvalidRequest
from cluster.gateway.active import ActiveRequests


class Worker:
    def __init__(self) -> None:
        self.stops = 0

    async def stop(self) -> None:
        self.stops += 1


def test_an_id_in_use_is_refused_until_its_request_ends() -> None:
    active = ActiveRequests()
    with active.running("red", "a"):
        with pytest.raises(InvalidRequest, match="request_id is a, but must be unlike"), active.running("red", "a"):
            pass
        with active.running("blue", "a"):
            assert len(active) == 2
    with active.running("red", "a"):
        assert len(active) == 1


def test_no_tenant_finds_another_ones_request() -> None:
    active = ActiveRequests()
    with active.running("red", "a") as request:
        assert active.find("red", "a") is request
        assert active.find("blue", "a") is None
    assert active.find("red", "a") is None


async def test_cancelling_reaches_the_worker_whether_it_has_the_request_or_gets_it_later() -> None:
    worker = Worker()
    active = ActiveRequests()
    with active.running("red", "a") as request:
        async with request.held_by(worker.stop):
            assert worker.stops == 0
            await request.cancel()
            assert worker.stops == 1
        await request.cancel()
        assert worker.stops == 1
    with active.running("red", "b") as request:
        await request.cancel()
        assert (request.cancelled, worker.stops) == (True, 1)
        async with request.held_by(worker.stop):
            assert worker.stops == 2
