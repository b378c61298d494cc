"""A simulated worker: a queue, two pools, and steps of continuous batching with chunked prefill.

Each step takes the decoding rows, then prompts in order of arrival, up to the token budget. While nothing but
decoding goes on, steps are alike, and the worker runs as many as it takes until a request ends in one go; a
submission cuts that short at the next step's end. Invariants: requests start in the order in which they came; one
that started has all the blocks that it will need, so it ends.

Differs from the real worker in one thing: room for an answer is taken when its request starts, not as it grows, so that
none is preempted. Driven by `simulation`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from math import ceil, floor

from cluster.bench.route.pools import SimPool
from cluster.bench.route.request import Outcome, SimRequest
from cluster.bench.route.timing import WorkerSpec
from cluster.core.handle import Coupling


@dataclass(slots=True)
class Hold:
    """A request's blocks in one pool: the leading published ones that it holds, and how many more are its own."""

    pool: SimPool
    depth: int
    own: int


@dataclass(slots=True)
class Job:
    """A request on its worker."""

    request: SimRequest
    holds: tuple[Hold, ...] = ()
    reused: tuple[int, int, int] = (0, 0, 0)
    """Tokens of target, draft and both."""
    start: int = 0
    done: int = 0
    """Prompt tokens computed."""
    draft_ms: float = 0.0
    """Draft prefill that comes with each prompt token."""
    first_token: float = 0.0

    @property
    def left(self) -> int:
        return self.request.prompt_tokens - self.start - self.done

    @property
    def next_block(self) -> int | None:
        """The first full block of its prompt that it doesn't hold in the target pool."""
        depth = self.holds[0].depth
        return self.request.prompt[depth] if depth < len(self.request.prompt) else None


class Verdict(Enum):
    """What became of a waiting request: WAITS means that a request of this step computes the very block that it lacks
    first, so that it can share it in the next one."""

    STARTED = auto()
    WAITS = auto()
    NO_ROOM = auto()


class SimWorker:
    def __init__(self, index: int, spec: WorkerSpec, block_size: int) -> None:
        self.index = index
        self.spec = spec
        self.block_size = block_size
        self.changed: set[int] = set()
        blocks = spec.pool_tokens // block_size
        self.target, self.draft = SimPool(blocks, self.changed), SimPool(blocks, self.changed)
        self.waiting: deque[Job] = deque()
        self.wakes_at: float | None = None
        """When its present steps end; None while it has nothing to do."""
        self.busy_ms = 0.0
        self.started_since_news: list[int] = []
        self._prefilling: deque[Job] = deque()
        self._chunks: list[tuple[Job, int]] = []
        self._computing: set[int] = set()
        """The first block that each prompt of the present step adds."""
        self._decoding: list[tuple[int, int, Job]] = []
        self._steps = 0
        self._speculative = 0
        self._context = 0.0
        self._growth = 0.0
        """Tokens that the decoding rows' contexts grow by in a step."""
        self._began = 0.0
        self._step_s = 0.0
        self._count = 0

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens not computed yet; those waiting count in full, as nothing is claimed for them yet."""
        return sum(job.left for job in self._prefilling) + sum(job.request.prompt_tokens for job in self.waiting)

    # ---------------------------------------------------------------- from outside

    def submit(self, request: SimRequest, now: float) -> None:
        self.waiting.append(Job(request))
        self.started_since_news.append(request.number)
        if self.wakes_at is None:
            self._next(now)
        elif not self._chunks:
            done = min(self._count, floor((now - self._began) / self._step_s) + 1)
            if done < self._count:
                self._count = done
                self.wakes_at = self._began + done * self._step_s

    def wake(self, now: float) -> Iterator[tuple[Job, Outcome | None]]:
        """Ends the present steps and begins the next. Yields the jobs that got their first token, without an outcome,
        and those that ended, with theirs."""
        self._steps += self._count
        self._context += self._growth * self._count
        self.busy_ms += 1000.0 * (now - self._began)
        ended = list(self._end_decodes(now))
        started = list(self._end_chunks(now))
        ended += list(self._end_decodes(now))
        self._next(now)
        yield from ((job, None) for job in started)
        yield from ended

    # ---------------------------------------------------------------- steps

    def _next(self, now: float) -> None:
        """Plans what runs from now on."""
        self._began, self._chunks = now, []
        self._computing.clear()
        rows = len(self._decoding)
        self._fill(self.spec.token_budget - rows)
        times = self.spec.times
        if not self._chunks and not rows:
            self.wakes_at = None
            return
        decode_ms = times.decode_ms(rows, self._speculative, self._context)
        if self._chunks:
            prefill_ms = sum(
                times.prefill_ms(job.start + job.done, tokens) + tokens * job.draft_ms for job, tokens in self._chunks
            )
            self._count, self._step_s = 1, (times.step_ms + decode_ms + prefill_ms) / 1000.0
        else:
            self._count = self._decoding[0][0] - self._steps
            grown = self._growth * self._count / 2 * times.kv_token_ms
            self._step_s = (times.step_ms + decode_ms + grown) / 1000.0
        self.wakes_at = now + self._count * self._step_s

    def _fill(self, budget: int) -> None:
        for job in self._prefilling:
            if budget <= 0:
                return
            budget -= self._chunk(job, budget)
        at = 0
        while budget > 0 and at < len(self.waiting) and self.running < self.spec.max_running:
            match self._start(self.waiting[at]):
                case Verdict.NO_ROOM:
                    return
                case Verdict.WAITS:
                    at += 1
                case Verdict.STARTED:
                    job = self.waiting[at]
                    del self.waiting[at]
                    self._prefilling.append(job)
                    budget -= self._chunk(job, budget)

    def _chunk(self, job: Job, budget: int) -> int:
        tokens = min(job.left, budget)
        self._chunks.append((job, tokens))
        following = job.next_block
        if following is not None and (job.start + job.done + tokens) // self.block_size > job.holds[0].depth:
            self._computing.add(following)
        return tokens

    def _end_chunks(self, now: float) -> Iterator[Job]:
        for job, tokens in self._chunks:
            job.done += tokens
            self._publish(job, job.request.prompt[: (job.start + job.done) // self.block_size])
            if job.left == 0:
                self._prefilling.remove(job)
                job.first_token = now
                self._decode(job)
                yield job

    def _decode(self, job: Job) -> None:
        request = job.request
        steps = ceil((request.output_tokens - 1) / request.tokens_per_step)
        heappush(self._decoding, (self._steps + steps, request.number, job))
        self._speculative += request.speculative
        self._context += request.prompt_tokens
        self._growth += request.tokens_per_step

    def _end_decodes(self, now: float) -> Iterator[tuple[Job, Outcome]]:
        while self._decoding and self._decoding[0][0] <= self._steps:
            _, _, job = heappop(self._decoding)
            request = job.request
            steps = ceil((request.output_tokens - 1) / request.tokens_per_step)
            self._speculative -= request.speculative
            self._context -= request.prompt_tokens + steps * request.tokens_per_step
            self._growth -= request.tokens_per_step
            self._publish(job, request.whole)
            self._release(job)
            ttft, end = job.first_token - request.at, now - request.at
            yield job, Outcome(request, self.index, ttft, end, *job.reused)

    # ---------------------------------------------------------------- blocks

    def _start(self, job: Job) -> Verdict:
        """Claims what the pools hold of the prompt and takes all the blocks that the request will need."""
        request = job.request
        pools = (self.target, self.draft) if request.speculative else (self.target,)
        needed = ceil((request.prompt_tokens + request.output_tokens) / self.block_size)
        depths = [pool.depth(request.prompt) for pool in pools]
        holds: list[Hold] = []
        for pool, depth in zip(pools, depths, strict=True):
            pool.hold(request.prompt[:depth])
            holds.append(Hold(pool, depth, 0))
        job.holds = tuple(holds)
        waits = job.next_block in self._computing
        for hold in holds:
            if waits or not hold.pool.take(needed - hold.depth):
                self._release(job)
                return Verdict.WAITS if waits else Verdict.NO_ROOM
            hold.own = needed - hold.depth
        self._begin(job, depths)
        return Verdict.STARTED

    def _begin(self, job: Job, depths: Sequence[int]) -> None:
        most = job.request.prompt_tokens - 1
        tokens = [min(depth * self.block_size, most) for depth in depths]
        job.start = tokens[0] if self.spec.coupling is Coupling.INDEPENDENT else min(tokens)
        job.reused = (tokens[0], tokens[1] if len(tokens) > 1 else 0, min(tokens))
        if len(tokens) > 1:
            draft_start = tokens[1] if self.spec.coupling is Coupling.INDEPENDENT else job.start
            lacking = job.request.prompt_tokens - draft_start
            job.draft_ms = self.spec.times.draft_token_ms * lacking / job.left

    def _publish(self, job: Job, chain: Sequence[int]) -> None:
        for hold in job.holds:
            if len(chain) > hold.depth:
                hold.pool.publish(chain[hold.depth :])
                hold.own -= len(chain) - hold.depth
                hold.depth = len(chain)

    def _release(self, job: Job) -> None:
        for hold in job.holds:
            hold.pool.let_go(job.request.whole[: hold.depth])
            hold.pool.give_back(hold.own)
        job.holds = ()
