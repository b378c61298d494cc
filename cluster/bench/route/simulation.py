"""One workload through one policy on a cluster of simulated workers: the event loop.

Events are arrivals, ends of workers' steps, and workers' news. News (load, and what the pools gained and lost) reach
the policy 20 ms after something changed, as the real worker's heartbeats and reports do; first tokens and ends are
known at once, because answers stream through whoever placed the request. Deterministic: equal times are handled in
the order in which the events were made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush

from cluster.bench.route.policy import News, Policy
from cluster.bench.route.request import Outcome, SimRequest, Workload
from cluster.bench.route.timing import WorkerSpec
from cluster.bench.route.worker import SimWorker
from cluster.errors import ConfigError

NEWS_DELAY_S = 0.02


@dataclass(frozen=True, slots=True)
class Run:
    """What a policy made of a workload."""

    outcomes: tuple[Outcome, ...]
    """In order of arrival."""
    busy_ms: tuple[float, ...]
    """For each worker, the time spent in steps."""
    evicted: int
    """Blocks, in both pools of all workers."""


def simulate(workload: Workload, workers: int, spec: WorkerSpec, policy: Policy) -> Run:
    """Runs until every request has ended. Raises ConfigError for one that is larger than a pool."""
    _check_sizes(workload, spec)
    return _Simulation(workload, workers, spec, policy).run()


class _Simulation:
    def __init__(self, workload: Workload, workers: int, spec: WorkerSpec, policy: Policy) -> None:
        self._requests = workload.requests
        self._workers = [SimWorker(index, spec, workload.block_size) for index in range(workers)]
        self._policy = policy
        self._events: list[tuple[float, int, int, bool]] = []
        """(time, tie breaker, worker, whether these are news)"""
        self._made = 0
        self._news_due = [False] * workers
        self._outcomes: list[Outcome] = []

    def run(self) -> Run:
        for request in self._requests:
            self._advance(request.at)
            self._place(request)
        self._advance(float("inf"))
        outcomes = sorted(self._outcomes, key=lambda outcome: outcome.request.number)
        evicted = sum(worker.target.evicted + worker.draft.evicted for worker in self._workers)
        return Run(tuple(outcomes), tuple(worker.busy_ms for worker in self._workers), evicted)

    def _advance(self, until: float) -> None:
        """Handles all events before that time."""
        events = self._events
        while events and events[0][0] <= until:
            now, _, index, is_news = heappop(events)
            worker = self._workers[index]
            if is_news:
                self._news_due[index] = False
                self._policy.news(index, _news_of(worker), now)
                worker.changed.clear()
                worker.started_since_news.clear()
            elif worker.wakes_at == now:
                self._wake(worker, now)

    def _wake(self, worker: SimWorker, now: float) -> None:
        for job, outcome in worker.wake(now):
            if outcome is None:
                self._policy.first_token(worker.index, job.request, now)
            else:
                self._policy.ended(worker.index, job.request, now)
                self._outcomes.append(outcome)
        self._schedule(worker, now)

    def _place(self, request: SimRequest) -> None:
        worker = self._workers[self._policy.place(request, request.at)]
        before = worker.wakes_at
        worker.submit(request, request.at)
        if worker.wakes_at == before:
            self._tell(worker.index, request.at)
        else:
            self._schedule(worker, request.at)

    def _schedule(self, worker: SimWorker, now: float) -> None:
        if worker.wakes_at is not None:
            self._push(worker.wakes_at, worker.index, is_news=False)
        self._tell(worker.index, now)

    def _tell(self, index: int, now: float) -> None:
        if self._policy.wants_news and not self._news_due[index]:
            self._news_due[index] = True
            self._push(now + NEWS_DELAY_S, index, is_news=True)

    def _push(self, at: float, index: int, is_news: bool) -> None:
        self._made += 1
        heappush(self._events, (at, self._made, index, is_news))


def _check_sizes(workload: Workload, spec: WorkerSpec) -> None:
    capacity = spec.pool_tokens // workload.block_size * workload.block_size
    longest = max((request.prompt_tokens + request.output_tokens for request in workload.requests), default=0)
    if longest > capacity:
        raise ConfigError(
            f"workload {workload.name} has a request of {longest:,} tokens, but a pool of the simulated worker holds "
            f"{capacity:,}: leave it out."
        )


def _news_of(worker: SimWorker) -> News:
    return News(
        running=worker.running,
        waiting=len(worker.waiting),
        prefill_tokens=worker.prefill_tokens,
        arrived=tuple(worker.started_since_news),
        blocks=_states(worker, worker.changed),
        in_use=(worker.target.in_use, worker.draft.in_use),
        free=(worker.target.free, worker.draft.free),
        capacity=worker.target.capacity,
    )


def _states(worker: SimWorker, changed: Iterable[int]) -> list[tuple[int, bool, bool]]:
    """Changed blocks and whether target and draft hold them, parents first."""
    target, draft = worker.target, worker.draft
    return [(block, block in target, block in draft) for block in sorted(changed)]
