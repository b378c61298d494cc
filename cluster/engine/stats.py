"""Counters of an engine and a snapshot of them.

`EngineCounters` belongs to the engine thread and only ever grows; `EngineStats` is an immutable picture that other
threads may read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.core.paired_cache import PoolMeters


@dataclass(slots=True)
class EngineCounters:
    """Since the engine started. Tokens unless the name says otherwise."""

    steps: int = 0
    failed_steps: int = 0
    finished_requests: int = 0
    computed: int = 0
    generated: int = 0
    draft_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`running` and `waiting` count requests, `backlog` the tokens they have yet to prefill; `pools` has the block
    meters of "target" and, if there is one, "draft".
    """

    running: int
    waiting: int
    backlog: int
    steps: int
    failed_steps: int
    finished_requests: int
    computed: int
    generated: int
    draft_steps: int
    drafted: int
    accepted: int
    preemptions: int
    pools: Mapping[str, PoolMeters]

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted drafts per verifying step; None before the first."""
        return 1 + self.accepted / self.draft_steps if self.draft_steps else None
