"""What `tandem bench route` asks and prints: its choices checked, its tables laid out.

Invariant: an unknown name is refused with those that exist; a trace that isn't there is left out with a sentence.
Called by `cluster.cli.bench`.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.table import Table

from cluster.bench.route.generators import GENERATORS
from cluster.bench.route.matrix import Results, Setup, find_traces
from cluster.bench.route.metrics import Objective
from cluster.bench.route.policies import DRAFT_BLIND, POLICIES
from cluster.bench.route.report import COLUMNS, rows, standings
from cluster.errors import ConfigError


def route_setup(
    workloads: Sequence[str] | None,
    workers: Sequence[int] | None,
    policies: Sequence[str] | None,
    traces: Path,
    tell: Callable[[str], None],
    *,
    seeds: int,
    load: float,
    requests: int,
    objective: Objective,
) -> Setup:
    """Raises ConfigError for a workload or a policy that doesn't exist. `tell` hears what is left out."""
    found = find_traces(traces)
    if not found:
        tell(f"workloads from traces are left out: {traces} holds none (--traces)")
    names = [name for name, _ in found]
    chosen = _known("workload", workloads, [*names, *GENERATORS])
    setup = Setup(
        workloads=tuple(name for name in GENERATORS if name in chosen),
        traces=tuple((name, path) for name, path in found if name in chosen),
        policies=tuple(name for name in POLICIES if name in _known("policy", policies, POLICIES)),
        seeds=seeds,
        load=load,
        requests=requests,
        objective=objective,
    )
    return replace(setup, workers=tuple(workers)) if workers else setup


def route_tables(results: Results) -> Iterator[Table]:
    """All figures, and how Tandem stands."""
    for (workload, workers), policies in results.items():
        yield _table(f"{workload} on {workers} workers; evicted: blocks for each request", COLUMNS, rows(policies))
    yield _table(
        "Tandem's TTFT over the best of the other routers' (below 1 it is faster); and its mean over that of the same "
        "router without knowledge of draft pools",
        ("workload", "workers", "best other", "mean", "p99", f"mean over {DRAFT_BLIND}"),
        (
            (
                each.workload,
                str(each.workers),
                each.best_other,
                f"{each.mean:.2f}",
                f"{each.p99:.2f}",
                "-" if each.draft_blind is None else f"{each.draft_blind:.2f}",
            )
            for each in standings(results)
        ),
    )


def _known(option: str, chosen: Sequence[str] | None, names: Collection[str]) -> Collection[str]:
    for name in chosen or ():
        if name not in names:
            raise ConfigError(f"{option} is {name}, but must be one of {', '.join(names)}.")
    return chosen or names


def _table(caption: str, columns: Sequence[str], lines: Iterator[tuple[str, ...]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table
