"""Any process of the cluster may be killed: the service stays up, and the cluster heals."""

import asyncio
import os
import signal
from contextlib import aclosing

import pytest

from actors.cluster import RunningCluster
from actors.supervisor import MemberStatus
from cluster.errors import Unavailable
from cluster.rpc.client import TandemClient
from tests.support.cluster import ask, eventually, fresh_prompt, is_healthy, settled, worker_state

pytestmark = pytest.mark.ray


def member(cluster: RunningCluster, name: str) -> MemberStatus:
    return next(each for each in cluster.members() if each.name == name)


def kill(cluster: RunningCluster, name: str) -> None:
    pid = member(cluster, name).pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


async def test_a_killed_worker_is_routed_around_and_replaced_cold(
    running_cluster: RunningCluster, client: TandemClient
) -> None:
    prompt = fresh_prompt()
    await settled(running_cluster)
    before = await ask(client, prompt)
    old_life = worker_state(running_cluster, before.worker).info
    kill(running_cluster, before.worker)

    for tail in range(3):
        assert (await ask(client, [*prompt, 900 + tail])).worker != before.worker
    again = await ask(client, prompt)
    assert again.tokens == before.tokens

    await eventually(lambda: is_healthy(running_cluster), "the worker is replaced")
    new_life = worker_state(running_cluster, before.worker)
    assert new_life.info.epoch > old_life.epoch
    assert new_life.info.pid != old_life.pid
    assert new_life.blocks_known == 0, "what its earlier life held is forgotten"
    assert member(running_cluster, before.worker).restarts >= 1

    other = fresh_prompt()
    await settled(running_cluster)
    assert (await ask(client, other)).reused == 0


async def test_a_stream_that_loses_its_worker_ends_with_an_error_for_the_user(
    running_cluster: RunningCluster, client: TandemClient
) -> None:
    await settled(running_cluster)
    prompt = fresh_prompt()
    stream = client.generate(prompt, max_tokens=1800, temperature=0.0, ignore_eos=True)
    async with aclosing(stream):
        await anext(stream)
        busy = next(each for each in running_cluster.state().workers if each.load.running or each.reserved)
        kill(running_cluster, busy.info.worker_id)
        with pytest.raises(Unavailable):
            async for _ in stream:
                pass
    await eventually(lambda: is_healthy(running_cluster), "the worker is replaced")


async def test_streams_outlive_the_scheduler_and_its_successor_knows_what_it_knew(
    running_cluster: RunningCluster, client: TandemClient
) -> None:
    await settled(running_cluster)
    prompt = fresh_prompt()
    first = await ask(client, prompt, max_tokens=400)
    await settled(running_cluster)
    known = {status.info.worker_id: status.blocks_known for status in running_cluster.state().workers}
    assert known[first.worker] > 0

    stream = client.generate(prompt, max_tokens=400, temperature=0.0, ignore_eos=True, timeout_s=60)
    begun = await anext(stream)
    kill(running_cluster, "tandem-scheduler")
    running = asyncio.create_task(collect_rest(begun.delta.token_ids, stream))
    queued = await ask(client, fresh_prompt())  # waits out the restart
    assert len(queued.tokens) == 16
    assert await running == first.tokens

    await eventually(lambda: is_healthy(running_cluster), "the scheduler is replaced")
    await eventually(
        lambda: all(status.blocks_known >= known[status.info.worker_id] for status in running_cluster.state().workers),
        "the new scheduler has the workers' snapshots",
    )
    await settled(running_cluster)
    later = await ask(client, [*prompt, 900])
    assert later.worker == first.worker
    assert later.reused >= len(prompt) - 16


async def test_a_killed_gateway_comes_back_at_the_same_address(
    running_cluster: RunningCluster, client: TandemClient
) -> None:
    prompt = fresh_prompt()
    await settled(running_cluster)
    before = await ask(client, prompt)
    kill(running_cluster, "tandem-gateway")
    await eventually(
        lambda: member(running_cluster, "tandem-gateway").restarts >= 1 and is_healthy(running_cluster),
        "the gateway is replaced",
    )
    async with TandemClient(running_cluster.endpoint) as anew:
        after = await ask(anew, prompt)
    assert after.tokens == before.tokens
    assert after.reused > 0, "tenants keep their salt, so their KV is found again"


async def collect_rest(first: object, stream: object) -> tuple[int, ...]:
    tokens = list(first)  # type: ignore[call-overload]
    async for response in stream:  # type: ignore[attr-defined]
        tokens += response.delta.token_ids
    return tuple(tokens)
