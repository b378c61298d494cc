"""What a comparison of routers says: flat keys, rows of a table, and how Tandem stands against the others.

Pure: results in, values and text out. Used by `tandem bench route` and `chart`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.bench.route.matrix import Figures, Results
from cluster.bench.route.policies import DRAFT_BLIND, OURS

KEYS = ("ttft_mean", "ttft_p99", "goodput", "reuse_joint", "imbalance")
COLUMNS = (
    *("router", "TTFT s", "p50 / p90 / p99", "end to end s", "p50 / p90 / p99", "good/s"),
    *("reuse target / draft / joint", "imbalance", "evicted"),
)


@dataclass(frozen=True, slots=True)
class Standing:
    """Tandem's mean and p99 TTFT over those of another policy: below 1 it is faster."""

    workload: str
    workers: int
    best_other: str
    mean: float
    p99: float
    """Against the lowest p99 of the others, whoever has it."""
    draft_blind: float | None
    """Mean TTFT over that of the same router without draft-awareness, if it was run."""


def flat_keys(results: Results) -> dict[str, float]:
    """`route.<workload>.<workers>.<policy>.<figure>`, and for Tandem the ratios of `standings`."""
    figures = {
        f"route.{workload}.{workers}.{policy}.{key}": values[key][0]
        for (workload, workers), policies in results.items()
        for policy, values in policies.items()
        for key in KEYS
    }
    for standing in standings(results):
        prefix = f"route.{standing.workload}.{standing.workers}.{OURS}"
        figures[f"{prefix}.ttft_mean_vs_best"] = standing.mean
        figures[f"{prefix}.ttft_p99_vs_best"] = standing.p99
        if standing.draft_blind is not None:
            figures[f"{prefix}.ttft_mean_vs_{DRAFT_BLIND}"] = standing.draft_blind
    return figures


def rows(policies: Mapping[str, Figures]) -> Iterator[tuple[str, ...]]:
    """One row for each policy of a case, in `COLUMNS`. The first TTFT is the mean, with its standard deviation."""
    for policy, values in policies.items():
        mean, spread = values["ttft_mean"]
        yield (
            policy,
            f"{mean:.3f} ±{spread:.3f}",
            _together(values, "ttft", ".2f"),
            f"{_mean(values, 'e2e_mean'):.2f}",
            _together(values, "e2e", ".1f"),
            f"{_mean(values, 'goodput'):.1f}",
            " / ".join(f"{_mean(values, f'reuse_{pool}'):.1%}" for pool in ("target", "draft", "joint")),
            f"{_mean(values, 'imbalance'):.2f}",
            f"{_mean(values, 'evictions'):.1f}",
        )


def standings(results: Results) -> list[Standing]:
    """Where Tandem was run, against the other routers; its own ablation isn't one of them."""
    found = []
    for (workload, workers), policies in results.items():
        others = {name: figures for name, figures in policies.items() if name not in (OURS, DRAFT_BLIND)}
        if OURS in policies and others:
            ours = policies[OURS]
            best = min(others, key=lambda name: _mean(others[name], "ttft_mean"))
            blind = policies.get(DRAFT_BLIND)
            found.append(
                Standing(
                    workload,
                    workers,
                    best,
                    _mean(ours, "ttft_mean") / _mean(others[best], "ttft_mean"),
                    _mean(ours, "ttft_p99") / _lowest(others, "ttft_p99"),
                    None if blind is None else _mean(ours, "ttft_mean") / _mean(blind, "ttft_mean"),
                )
            )
    return found


def _together(values: Figures, name: str, form: str) -> str:
    return " / ".join(format(_mean(values, f"{name}_{quantile}"), form) for quantile in ("p50", "p90", "p99"))


def _lowest(policies: Mapping[str, Figures], name: str) -> float:
    return min(_mean(figures, name) for figures in policies.values())


def _mean(figures: Figures, name: str) -> float:
    return figures[name][0]
