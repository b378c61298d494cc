"""Every policy on every workload, cluster size and seed: `tandem bench route`.

A seed makes the workload (or picks the stretch of a trace) and the policies' random choices; all policies of one seed
get the same requests. Runs are independent of each other, so they may be spread over processes without changing a
figure.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from cluster.bench.route.arrivals import Demand
from cluster.bench.route.generators import GENERATORS, generate
from cluster.bench.route.metrics import Objective, figures_of, over_seeds
from cluster.bench.route.policies import POLICIES
from cluster.bench.route.request import Workload
from cluster.bench.route.simulation import simulate
from cluster.bench.route.timing import WorkerSpec
from cluster.bench.route.traces import AZURE_BLOCK, MOONCAKE_BLOCK, Record, read_azure, read_mooncake, trace_workload

Figures = dict[str, tuple[float, float]]
"""Name -> mean and standard deviation over the seeds."""
MIXED, PLAIN_SHARE = "_mixed", 1 / 3
"""The conversation trace says nothing of speculation; this variant shows what it means that some don't speculate."""
Results = dict[tuple[str, int], dict[str, Figures]]
"""(workload, workers) -> policy -> figures"""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a whole comparison runs."""

    workloads: tuple[str, ...] = tuple(GENERATORS)
    traces: tuple[tuple[str, Path], ...] = ()
    """Traces by the names of their workloads, which come on top."""
    workers: tuple[int, ...] = (8, 64, 256)
    policies: tuple[str, ...] = tuple(POLICIES)
    seeds: int = 5
    load: float = 0.6
    requests: int = 2000
    """For 8 workers; more workers get more, but fewer each."""
    spec: WorkerSpec = field(default_factory=WorkerSpec)
    objective: Objective = field(default_factory=Objective)

    def cases(self) -> Iterator[tuple[str, int]]:
        for name in (*(name for name, _ in self.traces), *self.workloads):
            for workers in self.workers:
                yield name, workers

    def demand(self, workers: int) -> Demand:
        return Demand(round(self.requests * (workers / 8) ** 0.4), workers, self.load, self.spec.times)


def find_traces(folder: Path) -> tuple[tuple[str, Path], ...]:
    """Mooncake's and Azure's traces under the folder, named as workloads: `mooncake/conversation_trace.jsonl` is
    "conversation" and "conversation_mixed", `azure/AzureLLMInferenceTrace_conv.csv` is "azure_conv"."""
    mooncake = [
        (path.stem.removesuffix("_trace") + variant, path)
        for path in sorted(folder.glob("mooncake/*.jsonl"))
        for variant in ("", MIXED)
    ]
    azure = [("azure_" + path.stem.rpartition("_")[2], path) for path in sorted(folder.glob("azure/*.csv"))]
    return (*mooncake, *azure)


def run_matrix(setup: Setup, jobs: int = 1, tell: Callable[[str], None] = lambda _: None) -> Results:
    """`tell` hears which case runs. Raises ConfigError for a file that isn't a trace."""
    results: Results = {}
    with _pool(jobs) as pool:
        for name, workers in setup.cases():
            tell(f"{name} on {workers} workers")
            runs = [(setup, name, workers, policy, seed) for policy in setup.policies for seed in range(setup.seeds)]
            figures = list(pool.map(_run, runs)) if pool else list(map(_run, runs))
            results[name, workers] = {
                policy: over_seeds(figures[at * setup.seeds : (at + 1) * setup.seeds])
                for at, policy in enumerate(setup.policies)
            }
    return results


def workload_of(setup: Setup, name: str, workers: int, seed: int) -> Workload:
    rng, demand = random.Random(f"{name} {workers} {seed}"), setup.demand(workers)
    path = dict(setup.traces).get(name)
    if path is None:
        return generate(name, demand, rng)
    block_size = AZURE_BLOCK if path.suffix == ".csv" else MOONCAKE_BLOCK
    plain = PLAIN_SHARE if name.endswith(MIXED) else 0.0
    return trace_workload(name, _records(path), block_size, demand, rng, plain)


def _run(case: tuple[Setup, str, int, str, int]) -> dict[str, float]:
    setup, name, workers, policy, seed = case
    workload = workload_of(setup, name, workers, seed)
    router = POLICIES[policy](workers, random.Random(seed), setup.spec, workload.block_size)
    return figures_of(simulate(workload, workers, setup.spec, router), setup.objective)


@cache
def _records(path: Path) -> Sequence[Record]:
    return read_azure(path) if path.suffix == ".csv" else read_mooncake(path)


@contextmanager
def _pool(jobs: int) -> Iterator[Executor | None]:
    if jobs == 1:
        yield None
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield pool
