"""Reads and writes the directory: the registry of workers and the anchors of what they hold.

Invariant: nothing here is needed for a correct answer. Every call is bounded in time by the breaker and raises only
`DirectoryDown`; values of an unknown shape are skipped. Called by the scheduler actor, which is the only writer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice

import redis
from pydantic import SecretStr
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError

from cluster.directory.breaker import Breaker, BreakerState
from cluster.directory.schema import (
    AnchorHolder,
    Schema,
    pack_holders,
    pack_worker,
    unpack_holders,
    unpack_worker,
    worker_tag,
)
from cluster.errors import ConfigError
from cluster.routing.prefix_map import Depth
from cluster.routing.types import WorkerInfo

logger = logging.getLogger(__name__)

_READ_LIMIT_S = 0.020
"""A request waits for this."""
_WRITE_LIMIT_S = 0.5
"""Nobody waits for this."""
_ANCHORS_PER_BATCH = 512


class Directory:
    def __init__(
        self,
        url: SecretStr,
        schema: Schema,
        *,
        lease_s: float,
        anchor_ttl_s: float = 1800.0,
        breaker: Breaker | None = None,
    ) -> None:
        # No retries and no timeouts of the client's own: the breaker decides how long an operation may take.
        self._redis = Redis.from_url(url.get_secret_value(), retry=Retry(NoBackoff(), 0), max_connections=64)
        self._schema = schema
        self._lease_ms = int(lease_s * 1000)
        self._anchor_ttl_ms = int(anchor_ttl_s * 1000)
        self._breaker = breaker or Breaker()

    @property
    def up(self) -> bool:
        return self._breaker.state is BreakerState.CLOSED

    async def announce(self, workers: Sequence[WorkerInfo]) -> set[str]:
        """Renews the workers' leases in the registry; returns the ids that were not in it."""
        if not workers:
            return set()

        async def write() -> list[bytes | None]:
            async with self._redis.pipeline(transaction=False) as pipe:
                for info in workers:
                    key = self._schema.worker_key(info.worker_id)
                    pipe.set(key, pack_worker(info), px=self._lease_ms, get=True)
                pipe.sadd(self._schema.workers_key, *(info.worker_id for info in workers))
                return await pipe.execute()

        before = await self._breaker.call(write, _WRITE_LIMIT_S)
        return {info.worker_id for info, old in zip(workers, before, strict=False) if old is None}

    async def workers(self) -> list[WorkerInfo]:
        """The workers whose lease is valid."""

        async def read() -> list[bytes | None]:
            ids = [_as_bytes(member).decode() for member in await self._redis.smembers(self._schema.workers_key)]
            return await self._mget([self._schema.worker_key(worker_id) for worker_id in ids])

        values = await self._breaker.call(read, _WRITE_LIMIT_S)
        found = (unpack_worker(value) for value in values if value is not None)
        return [info for info in found if info is not None]

    async def forget(self, worker_id: str) -> None:
        """Takes a dead worker out of the registry. Its anchors stay: their epoch makes them void."""

        async def write() -> None:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.delete(self._schema.worker_key(worker_id))
                pipe.srem(self._schema.workers_key, worker_id)
                await pipe.execute()

        await self._breaker.call(write, _WRITE_LIMIT_S)

    async def put_anchors(self, anchors: Mapping[bytes, Sequence[AnchorHolder]]) -> None:
        """Replaces the holders of these anchor blocks."""

        left = iter(anchors.items())

        async def write() -> int:
            written = 0
            async with self._redis.pipeline(transaction=False) as pipe:
                for block_key, holders in islice(left, _ANCHORS_PER_BATCH):
                    written += 1
                    key = self._schema.anchor_key(block_key)
                    if holders:
                        pipe.set(key, pack_holders(holders), px=self._anchor_ttl_ms)
                    else:
                        pipe.delete(key)
                await pipe.execute()
            return written

        while await self._breaker.call(write, _WRITE_LIMIT_S) == _ANCHORS_PER_BATCH:
            pass

    async def hints(self, keys: Sequence[bytes], workers: Sequence[WorkerInfo]) -> dict[tuple[str, int], Depth]:
        """How deep these lives of workers hold a prompt, to the anchors' precision: (worker id, epoch) -> depth in
        blocks."""
        anchors = self._schema.anchors_of(keys)
        if not anchors:
            return {}
        names = [self._schema.anchor_key(key) for key in anchors]
        values = await self._breaker.call(lambda: self._mget(names), _READ_LIMIT_S)
        lives = {(worker_tag(info.worker_id), info.epoch): (info.worker_id, info.epoch) for info in workers}
        found: dict[tuple[str, int], Depth] = {}
        for holder in (holder for value in values if value is not None for holder in unpack_holders(value)):
            life = lives.get((holder.worker_tag, holder.epoch))
            if life is not None:
                known = found.get(life, Depth(0, 0))
                found[life] = Depth(max(known.target, holder.target), max(known.draft, holder.draft))
        return found

    async def close(self) -> None:
        await self._redis.aclose()

    async def _mget(self, names: Sequence[str]) -> list[bytes | None]:
        values = await self._redis.mget(names) if names else []
        return [None if value is None else _as_bytes(value) for value in values]


def _as_bytes(value: bytes | str) -> bytes:
    # The client's types allow for decoded answers, which this client doesn't ask for.
    return value if isinstance(value, bytes) else value.encode()


def check_url(url: SecretStr) -> None:
    """Looks once, at start, whether the server takes our credentials. One that is down is no error: it may come back.

    Raises:
        ConfigError: the URL is not one, or the server refuses us.
    """
    try:
        with redis.Redis.from_url(url.get_secret_value(), socket_timeout=2.0, socket_connect_timeout=2.0) as client:
            client.ping()
    except ValueError:
        raise ConfigError(
            "cluster.redis_url is not a URL of Redis, but must be like redis://user:password@host:6379/0: correct it."
        ) from None
    except (AuthenticationError, AuthorizationError, NoPermissionError, ResponseError):
        raise ConfigError(
            "cluster.redis_url names a Redis that refuses its user or password: "
            "correct them in TANDEM_CLUSTER__REDIS_URL."
        ) from None
    except (RedisError, OSError) as error:
        logger.warning("event=directory_down error=%s", type(error).__name__)
