"""Tandem's own router in the simulation: `cluster.routing.router` as the scheduler runs it, fed with heartbeats and
reports.

`draft_aware=False` is the ablation: the same router, told that each draft pool holds what the target pool holds, as a
router that tracks target KV alone must assume. Created by `policies`.
"""

from __future__ import annotations

import random

from cluster.bench.route.policy import Deaf, News
from cluster.bench.route.request import SimRequest
from cluster.bench.route.timing import WorkerSpec
from cluster.core.frontier import BlockState, FrontierReport
from cluster.core.handle import Coupling
from cluster.errors import TandemError
from cluster.routing.policy import CostModel
from cluster.routing.router import Router, RouterLimits
from cluster.routing.types import DispatchQuery, ModelCard, Placement, PoolSize, PoolUsage, WorkerInfo, WorkerLoad

MODEL = "simulated"
MAX_TOKENS = 1024
"""What clients ask for: no router knows how long an answer will be."""
DECODE_STEPS, CONTEXT = 50, 6000
"""An answer's steps and a request's context, as calibration would find them typical."""
TICK_S = 0.2
"""How often the scheduler has the router end what ran out of time."""
_NO_LEASE_S = 1e9


class TandemRouter(Deaf):
    def __init__(
        self, workers: int, rng: random.Random, spec: WorkerSpec, block_size: int, draft_aware: bool = True
    ) -> None:
        limits = RouterLimits(lease_s=_NO_LEASE_S)
        self.router = Router(limits, cost_model(spec), rng)
        self._block_size = block_size
        self._draft_aware = draft_aware
        self._coupling = spec.coupling
        self._seq = [0] * workers
        self._tick_at = 0.0
        card = ModelCard(MODEL, "", "", block_size, max_len=2**31, vocab_size=2**31)
        for index in range(workers):
            info = WorkerInfo(
                worker_id=str(index),
                epoch=1,
                address="",
                model=card,
                coupling=spec.coupling,
                max_running=spec.max_running,
                max_queue=spec.max_queue,
                pools=tuple(
                    PoolSize(name, spec.pool_tokens // block_size, block_size, 0, 0) for name in ("target", "draft")
                ),
            )
            self.router.register(info, 0, 0.0)

    @property
    def wants_news(self) -> bool:
        return True

    def place(self, request: SimRequest, now: float) -> int:
        query = DispatchQuery(
            request_id=str(request.number),
            model=MODEL,
            keys=tuple(map(_key, request.prompt)),
            n_tokens=request.prompt_tokens,
            max_tokens=MAX_TOKENS,
            block_size=self._block_size,
            speculate=request.speculative,
        )
        if now >= self._tick_at:
            self.router.expire(now)
            self._tick_at = now + TICK_S
        answer = self.router.dispatch(query, now)
        if not isinstance(answer, Placement):
            raise TandemError(f"request {request.number} was refused: {answer.reason}")
        return int(answer.worker_id)

    def news(self, worker: int, news: News, now: float) -> None:
        if news.blocks:
            self._seq[worker] += 1
            self.router.apply(self._report(worker, news))
        self.router.heartbeat(str(worker), 1, self._load(worker, news), now)

    def _report(self, worker: int, news: News) -> FrontierReport:
        aware = self._draft_aware
        stored = tuple(
            BlockState(_key(block), None, 0, target, draft if aware else target)
            for block, target, draft in news.blocks
            if target or draft
        )
        removed = tuple(_key(block) for block, target, draft in news.blocks if not (target or draft))
        return FrontierReport(str(worker), 1, self._seq[worker], stored, removed)

    def _load(self, worker: int, news: News) -> WorkerLoad:
        pools = tuple(
            PoolUsage(name, news.capacity, free, news.capacity - free - in_use, in_use)
            for name, free, in_use in zip(("target", "draft"), news.free, news.in_use, strict=True)
        )
        return WorkerLoad(
            running=news.running,
            waiting=news.waiting,
            prefill_tokens=news.prefill_tokens,
            started=tuple(map(str, news.arrived)),
            pools=pools,
            last_seq=self._seq[worker],
        )


def cost_model(spec: WorkerSpec) -> CostModel:
    """What calibration on such a worker would find."""
    times = spec.times
    return CostModel(
        target_token_ms=times.target_token_ms,
        target_context_ms=times.target_context_ms,
        draft_token_ms=times.draft_token_ms if spec.coupling is not Coupling.NONE else 0.0,
        decode_request_ms=DECODE_STEPS * (times.row_ms + times.kv_token_ms * CONTEXT),
        queued_request_ms=500.0,
        eviction_weight=0.1,
    )


def _key(block: int) -> bytes:
    return block.to_bytes(8, "little")
