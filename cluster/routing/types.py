"""The values that pass between gateway, scheduler and workers when a request is placed.

Invariant: every value is immutable and holds plain data only, so that it crosses a process boundary unchanged.
Used by the gateway (asks), the router (answers), the actors (carry) and the directory (stores `WorkerInfo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core.frontier import Frontier
from cluster.core.handle import Coupling

HASH_SCHEME = "sha256-raw-v1"
"""Names how raw block keys are derived and salted (`cluster.core.keys`). Peers that differ in it can't share keys."""


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What must agree between a gateway and a worker for their block keys to be comparable, and the limits clients
    see."""

    name: str
    """The name clients ask for."""
    fingerprint: str
    """Digest of the target's weights and configuration: the `model` field of the reuse scope."""
    kv_dtype: str
    block_size: int
    """Tokens in one raw block (a target block)."""
    max_len: int
    """Longest prompt plus output, in tokens."""
    vocab_size: int
    hash_scheme: str = HASH_SCHEME

    def disagreement(self, other: ModelCard) -> str | None:
        """The first field in which two cards of the same model differ, as "field: mine != theirs", or None."""
        for name in ("name", "fingerprint", "kv_dtype", "block_size", "hash_scheme"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} != {theirs!r}"
        return None


@dataclass(frozen=True, slots=True)
class PoolSize:
    """One KV pool as configured: what the start-up box and the status command print."""

    name: str
    num_blocks: int
    block_size: int
    num_bytes: int
    span: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One life of one worker, as it registers with the scheduler."""

    worker_id: str
    """Stable name, such as "worker-0"; survives a restart."""
    epoch: int
    """New and larger at each start: fences what an earlier life reported."""
    address: str
    """host:port of the worker's gRPC service."""
    model: ModelCard
    coupling: Coupling
    max_running: int
    """Requests that one step can hold."""
    max_queue: int
    """Requests that may wait behind them."""
    pools: tuple[PoolSize, ...] = ()
    method: str = "none"
    """Speculation method, for people."""
    num_speculative_tokens: int = 0
    pid: int = 0

    @property
    def capacity(self) -> int:
        """Requests that the worker accepts at once, running or waiting."""
        return self.max_running + self.max_queue


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """Blocks of one pool by state at one moment."""

    name: str
    total: int
    free: int
    cached: int
    in_use: int


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a heartbeat says of a worker."""

    running: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    """Prompt tokens not computed yet, over all requests that the worker has."""
    started: tuple[str, ...] = ()
    """Requests that arrived since the previous heartbeat: the load above contains them, so their reservations can
    go."""
    pools: tuple[PoolUsage, ...] = ()
    last_seq: int = 0
    """Number of the last frontier report sent: uncovers a lost last report."""
    acceptance: float = 1.0
    """Tokens that a decode step yields on average; 1 without speculation."""


@dataclass(frozen=True, slots=True)
class DispatchQuery:
    """What the gateway knows of a request before it runs."""

    request_id: str
    model: str
    keys: Sequence[bytes]
    """Raw keys of the prompt's full blocks, in order; as `PackedKeys` from a gateway."""
    n_tokens: int
    max_tokens: int
    block_size: int
    speculate: bool = True
    reuse: bool = True
    exclude: frozenset[str] = field(default_factory=frozenset)
    """Workers that just failed this request."""
    worker_id: str = ""
    """The only worker that may take it; empty: any."""
    tenant: str = ""
    """Whose request it is: only they are told how it was placed."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The answer: run it there."""

    worker_id: str
    epoch: int
    address: str
    expected: Frontier
    """Tokens that the scheduler believes reusable there: a hint, the worker's own match decides."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The other answer: nobody can take it now."""

    reason: str
    """One sentence for the client."""
    retry_after_s: float
    saturated: bool
    """True: workers are alive but full (RESOURCE_EXHAUSTED). False: no worker is alive (UNAVAILABLE)."""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One line of the cluster's status."""

    info: WorkerInfo
    load: WorkerLoad
    state: str
    heartbeat_age_s: float
    reserved: int
    """Requests placed there that its heartbeats have not confirmed yet."""
    blocks_known: int
    """Raw blocks that the prefix map believes it holds in its target pool."""
