"""Figures, tables and the chart of a comparison."""

from xml.etree import ElementTree

import pytest

from cluster.bench.route.chart import chart
from cluster.bench.route.matrix import Setup, run_matrix
from cluster.bench.route.metrics import Objective, figures_of, over_seeds
from cluster.bench.route.report import COLUMNS, rows
from cluster.bench.route.request import Outcome
from cluster.bench.route.simulation import Run
from tests.unit.bench.route.builders import request


def outcome(number: int, ttft: float, per_token: float = 0.05, joint: int = 0) -> Outcome:
    asked = request(number, range(5), output=11, at=float(number))
    return Outcome(asked, 0, ttft, ttft + 10 * per_token, joint, joint, joint)


def test_figures_leave_the_warm_up_out_and_count_what_met_the_objective() -> None:
    slow_start = [outcome(0, 100.0), outcome(1, 100.0)]
    counted = [outcome(number, 1.0 if number < 9 else 5.0, joint=275) for number in range(2, 10)]
    figures = figures_of(Run((*slow_start, *counted), (30.0, 10.0), 20), Objective(ttft=4.0, per_token=0.1))
    assert figures["ttft_mean"] == pytest.approx((7 * 1.0 + 5.0) / 8)
    assert (figures["ttft_p50"], figures["ttft_p99"]) == (1.0, 5.0)
    assert figures["goodput"] == pytest.approx(7 / 7), "seven good ones in seven seconds"
    assert figures["reuse_joint"] == pytest.approx(0.5)
    assert figures["imbalance"] == pytest.approx(1.5)
    assert figures["evictions"] == pytest.approx(2.0)
    slow_tokens = Run(tuple(outcome(number, 1.0, per_token=0.2) for number in range(10)), (1.0,), 0)
    assert figures_of(slow_tokens, Objective())["goodput"] == 0


def test_spread_is_over_the_seeds() -> None:
    assert over_seeds([{"a": 1.0}, {"a": 3.0}]) == {"a": (2.0, 1.0)}


def test_the_table_has_a_row_for_each_router_and_the_chart_a_bar() -> None:
    setup = Setup(workloads=("chat", "hot"), workers=(2, 3), policies=("round_robin", "tandem"), seeds=2, requests=50)
    results = run_matrix(setup)
    lines = list(rows(results["chat", 2]))
    assert [line[0] for line in lines] == ["round_robin", "tandem"]
    assert all(len(line) == len(COLUMNS) for line in lines)
    drawing = ElementTree.fromstring(chart(results))
    names = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "name"]
    assert names == ["round_robin", "tandem"] * 4
