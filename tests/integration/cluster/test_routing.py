"""Requests follow their prefixes, and load, through the public API of a real cluster."""

import asyncio
from contextlib import aclosing

import pytest

from actors.cluster import RunningCluster
from cluster.errors import CapacityExceeded
from cluster.rpc.client import TandemClient
from tests.support.cluster import (
    MAX_BATCH,
    MAX_QUEUE,
    Answer,
    ask,
    eventually,
    fresh_prompt,
    settled,
    worker_state,
)

pytestmark = pytest.mark.ray


async def warm(cluster: RunningCluster, client: TandemClient, prompt: list[int]) -> Answer:
    """The first answer to a prompt, once the scheduler knows who holds it."""
    await settled(cluster)
    known = {status.info.worker_id: status.blocks_known for status in cluster.state().workers}
    answer = await ask(client, prompt)
    blocks = len(prompt) // 16
    await eventually(
        lambda: worker_state(cluster, answer.worker).blocks_known >= known[answer.worker] + blocks,
        "the scheduler hears of the prompt's blocks",
    )
    await settled(cluster)
    return answer


async def test_requests_that_share_a_prefix_go_to_its_holder(
    running_cluster: RunningCluster, client: TandemClient
) -> None:
    prompt = fresh_prompt()
    first = await warm(running_cluster, client, prompt)
    assert first.reused == 0
    for tail in range(4):
        await settled(running_cluster)
        later = await ask(client, [*prompt, 900 + tail])
        assert later.worker == first.worker
        assert later.reused >= len(prompt) - 16
        assert later.completion.reuse.target_tokens >= later.reused
        assert later.completion.reuse.draft_tokens >= later.reused


async def test_a_saturated_holder_is_passed_over_and_a_full_cluster_says_so(
    running_cluster: RunningCluster, client: TandemClient
) -> None:
    prompt = fresh_prompt()
    holder = (await warm(running_cluster, client, prompt)).worker
    async with aclosing(_Crowd(running_cluster, client, prompt)) as crowd:
        await crowd.grow_to(MAX_BATCH)
        assert worker_state(running_cluster, holder).load.running == MAX_BATCH
        elsewhere = await ask(client, [*prompt, 950])
        assert elsewhere.worker != holder
        await crowd.grow_to(2 * (MAX_BATCH + MAX_QUEUE))
        with pytest.raises(CapacityExceeded) as refused:
            await ask(client, [*prompt, 951])
        assert refused.value.retry_after_s > 0
    await settled(running_cluster)
    assert (await ask(client, [*prompt, 952])).reused >= len(prompt) - 16


class _Crowd:
    """Long requests that run at the same time, until it is closed."""

    def __init__(self, cluster: RunningCluster, client: TandemClient, prompt: list[int]) -> None:
        self._cluster, self._client, self._prompt = cluster, client, prompt
        self._requests: list[asyncio.Task[Answer]] = []

    async def grow_to(self, count: int) -> None:
        """Adds requests until the workers have `count`, one after the other."""
        while len(self._requests) < count:
            prompt = [*self._prompt, 800 + len(self._requests)]
            self._requests.append(asyncio.create_task(ask(self._client, prompt, max_tokens=1800)))
            await eventually(lambda: self._on_workers() >= len(self._requests), "a worker has the request")

    async def aclose(self) -> None:
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)

    def _on_workers(self) -> int:
        return sum(each.load.running + each.load.waiting for each in self._cluster.state().workers)
