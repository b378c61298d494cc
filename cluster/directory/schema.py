"""Names and encodings of everything the cluster keeps in Redis.

    {prefix}:workers          set      ids of the workers that registered
    {prefix}:worker:<id>      string   WorkerInfo as JSON; expires with the worker's lease
    {prefix}:anchor:<key>     string   holders of one anchor block, 24 bytes each; expires when not refreshed. The key
                                       is 8 bytes of the block's

An anchor is every n-th block of a prompt's chain. Its holders are records of (worker tag, epoch, target depth, draft
depth): the depths in blocks, up to this anchor, that the worker's pools are known to hold. So one MGET over a
prompt's anchors tells how deep each worker holds it. The braces are a hash tag: all keys lie in one slot of a Redis
Cluster, as MGET demands.

Commands in use: PING, SADD, SREM, SMEMBERS, SET (with PX and GET), DEL, MGET. No scripts.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from cluster.routing.packed_keys import KEPT
from cluster.routing.types import WorkerInfo

_HOLDER = struct.Struct("<QQII")
_WORKER_INFO = TypeAdapter(WorkerInfo)


@dataclass(frozen=True, slots=True)
class AnchorHolder:
    """What one life of a worker holds of a chain, up to one anchor."""

    worker_tag: int
    epoch: int
    target: int
    draft: int


@dataclass(frozen=True, slots=True)
class Schema:
    prefix: str = "tandem"
    anchor_every: int = 32
    """Blocks from one anchor of a chain to the next."""

    def __post_init__(self) -> None:
        if self.anchor_every < 1:
            raise ValueError(f"anchor_every is {self.anchor_every}, but must be at least 1")
        if not self.prefix or set(self.prefix) & set("{}"):
            raise ValueError(f"prefix is {self.prefix!r}, but must be a word without braces")

    @property
    def workers_key(self) -> str:
        return f"{{{self.prefix}}}:workers"

    def worker_key(self, worker_id: str) -> str:
        return f"{{{self.prefix}}}:worker:{worker_id}"

    def anchor_key(self, block_key: bytes) -> str:
        return f"{{{self.prefix}}}:anchor:{block_key[:KEPT].hex()}"

    def is_anchor(self, block_index: int) -> bool:
        return (block_index + 1) % self.anchor_every == 0

    def anchors_of(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The anchors among the block keys of one prompt."""
        return keys[self.anchor_every - 1 :: self.anchor_every]


def worker_tag(worker_id: str) -> int:
    """Stands for a worker's id in 8 bytes."""
    return int.from_bytes(hashlib.sha256(worker_id.encode()).digest()[:8], "little")


def pack_holders(holders: Iterable[AnchorHolder]) -> bytes:
    return b"".join(_HOLDER.pack(holder.worker_tag, holder.epoch, holder.target, holder.draft) for holder in holders)


def unpack_holders(value: bytes) -> list[AnchorHolder]:
    """The holders in a stored value. Data of another shape, which somebody else wrote, holds none."""
    if len(value) % _HOLDER.size:
        return []
    return [AnchorHolder(*fields) for fields in _HOLDER.iter_unpack(value)]


def pack_worker(info: WorkerInfo) -> bytes:
    return _WORKER_INFO.dump_json(info)


def unpack_worker(value: bytes) -> WorkerInfo | None:
    """The worker in a stored value, or None if the value is not one."""
    try:
        return _WORKER_INFO.validate_json(value)
    except ValidationError:
        return None
