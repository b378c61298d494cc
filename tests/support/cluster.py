"""One real cluster for all tests that need one: Ray, Redis, a scheduler, two workers with the tiny model, a gateway.

Invariant: started at most once in a session, and every test that breaks something waits until it has healed. Tests
use the fixture `running_cluster`, which tests/conftest.py makes known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.fixtures.prompts import TINY_EAGLE3, TINY_TARGET

if TYPE_CHECKING:
    from actors.cluster import RunningCluster
    from cluster.config import TandemConfig
    from cluster.rpc._generated.tandem.v1 import tandem_pb2
    from cluster.rpc.client import TandemClient

LIMIT_S = 60.0
"""For anything to happen on a busy machine."""
MAX_BATCH, MAX_QUEUE = 2, 2
_fresh = itertools.count(1)


def tiny_config(**cluster: Any) -> TandemConfig:
    """Two small workers with an EAGLE3 draft, on a free port."""
    from cluster.config import load_config

    return load_config(
        {
            "model": TINY_TARGET,
            "served_model_name": "tiny",
            "log_level": "warning",
            "speculative": {"method": "eagle3", "model": TINY_EAGLE3, "num_speculative_tokens": 3},
            "engine": {"kv_cache_bytes": "16MiB", "max_batch": MAX_BATCH, "max_queue": MAX_QUEUE, "chunk": 64},
            "cluster": {"workers": 2, "port": 0, **cluster},
        }
    )


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[RunningCluster]:
    """Anchors at every second block, so that short prompts have some."""
    from actors.cluster import start_cluster
    from cluster.directory.schema import Schema

    with start_cluster(tiny_config(), schema=Schema(anchor_every=2)) as cluster:
        yield cluster
        processes = [psutil.Process(member.pid) for member in cluster.members() if member.pid is not None]
        processes += psutil.Process().children(recursive=True)
        directories = directories_of(processes)
    _, left = psutil.wait_procs(processes, timeout=0)
    assert left == [], "a clean stop leaves no process"
    assert directories
    assert [path for path in directories if path.exists()] == [], "a clean stop leaves no file"


def directories_of(processes: Sequence[psutil.Process]) -> set[Path]:
    """What the processes' command lines name below /tmp."""
    arguments: list[str] = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            arguments += " ".join(process.cmdline()).replace("=", " ").split()
    return {Path(*Path(each).parts[:3]) for each in arguments if each.startswith("/tmp/tandem-")}


@pytest.fixture
async def client(running_cluster: RunningCluster) -> AsyncIterator[TandemClient]:
    from cluster.rpc.client import TandemClient

    async with TandemClient(running_cluster.endpoint) as opened:
        yield opened


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    tokens: tuple[int, ...]
    completion: tandem_pb2.Completion

    @property
    def worker(self) -> str:
        return self.completion.worker_id

    @property
    def reused(self) -> int:
        """Prompt tokens found in both pools."""
        return self.completion.reuse.joint_tokens


async def ask(client: TandemClient, prompt: Sequence[int], max_tokens: int = 16, **options: Any) -> Answer:
    """A greedy answer of exactly `max_tokens` tokens."""
    stream = client.generate(
        list(prompt), max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=LIMIT_S, **options
    )
    return await collect(stream)


async def collect(stream: AsyncIterator[tandem_pb2.GenerateResponse]) -> Answer:
    """Checks that positions have no gap, and that a completion ends the stream."""
    tokens: list[int] = []
    completion = None
    async for response in stream:
        assert completion is None
        if response.HasField("delta"):
            assert response.delta.position == len(tokens)
            tokens += response.delta.token_ids
        else:
            completion = response.completion
    assert completion is not None
    return Answer(tuple(tokens), completion)


def fresh_prompt(length: int = 130) -> list[int]:
    """Token ids that no other prompt of the session starts with."""
    number = next(_fresh)
    return [10 + number, *((10 + 7 * number + index * index) % 1000 + 10 for index in range(length - 1))]


async def eventually(condition: Callable[[], bool | Awaitable[bool]], what: str) -> None:
    """Waits until the condition holds. Whatever it raises counts as not yet."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(Exception):
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
        assert time.monotonic() < deadline, f"not within {LIMIT_S:g} s: {what}"
        await asyncio.sleep(0.05)


def worker_state(cluster: RunningCluster, worker_id: str) -> Any:
    """The worker's line of the scheduler's picture."""
    return next(status for status in cluster.state().workers if status.info.worker_id == worker_id)


def is_healthy(cluster: RunningCluster) -> bool:
    """All processes run, both workers are live, and the scheduler can reach Redis."""
    state = cluster.state()
    return (
        all(member.phase == "running" for member in cluster.members())
        and [status.state for status in state.workers] == ["live", "live"]
        and state.directory_up
    )


async def settled(cluster: RunningCluster) -> None:
    """Waits until the cluster is healthy and idle, so that the next placement depends on prefixes alone."""

    def idle() -> bool:
        loads = [(each.load.running, each.load.waiting, each.reserved) for each in cluster.state().workers]
        return is_healthy(cluster) and loads == [(0, 0, 0), (0, 0, 0)]

    await eventually(idle, "the cluster is healthy and idle")
