"""Figures of one run, and of the same run under several seeds.

The first fifth of the requests warms the caches and isn't counted. A request is good if its first token came within
the objective's TTFT and the rest at its time per token or faster; goodput is good requests a second. Imbalance is the
busiest worker's time in steps over the mean of all. Reuse is a share of prompt tokens: `reuse_joint` is what requests
really started behind, in target and (if they speculate) draft together. Called by `matrix`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from cluster.bench.route.request import Outcome
from cluster.bench.route.simulation import Run

WARM_UP = 0.2


@dataclass(frozen=True, slots=True)
class Objective:
    """Seconds to the first token, and for each token after it."""

    ttft: float = 4.0
    per_token: float = 0.1


def figures_of(run: Run, objective: Objective) -> dict[str, float]:
    counted = run.outcomes[int(WARM_UP * len(run.outcomes)) :]
    span = max(counted[-1].request.at - counted[0].request.at, 1e-9)
    prompt_tokens = sum(outcome.request.prompt_tokens for outcome in counted)
    speculated = sum(outcome.request.prompt_tokens for outcome in counted if outcome.request.speculative)
    return {
        **_times("ttft", [outcome.ttft for outcome in counted]),
        **_times("e2e", [outcome.end_to_end for outcome in counted]),
        "goodput": sum(_is_good(outcome, objective) for outcome in counted) / span,
        "reuse_target": sum(outcome.reused_target for outcome in counted) / prompt_tokens,
        "reuse_draft": sum(outcome.reused_draft for outcome in counted) / max(1, speculated),
        "reuse_joint": sum(outcome.reused_joint for outcome in counted) / prompt_tokens,
        "imbalance": max(run.busy_ms) / max(fmean(run.busy_ms), 1e-9),
        "evictions": run.evicted / len(run.outcomes),
    }


def over_seeds(runs: Sequence[dict[str, float]]) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each figure."""
    return {name: (fmean(run[name] for run in runs), pstdev(run[name] for run in runs)) for name in runs[0]}


def _times(name: str, seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    quantiles = {f"{name}_p{share}": _quantile(ordered, share) for share in (50, 90, 99)}
    return {f"{name}_mean": fmean(ordered), **quantiles}


def _quantile(ordered: Sequence[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _is_good(outcome: Outcome, objective: Objective) -> bool:
    later = max(1, outcome.request.output_tokens - 1)
    per_token = (outcome.end_to_end - outcome.ttft) / later
    return outcome.ttft <= objective.ttft and per_token <= objective.per_token
