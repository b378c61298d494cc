"""`tandem bench router`: its figures are there, of decisions that are right, and memory stays in its bounds."""

from pathlib import Path

import pytest

from cluster.bench import router, router_workloads
from cluster.bench.router_workloads import decide, holdings, make_keys, make_query, make_router, memory
from cluster.routing.packed_keys import PackedKeys
from cluster.routing.types import Placement


def test_the_measured_decision_finds_the_deepest_holder() -> None:
    built, keys = make_router(), make_keys(1, 256)
    for report in holdings(keys, 8):
        built.apply(report)
    placed = built.dispatch(make_query(0, PackedKeys.of(keys)), 0.0)
    assert isinstance(placed, Placement)
    assert placed.worker_id == "worker-224", "the last of eight among 256 holds the whole prompt"
    assert (placed.expected.target, placed.expected.draft) == (256 * 16, 254 * 16)


def test_memory_is_bounded_and_flat_under_churn() -> None:
    used = memory(50_000)
    assert used.bytes_per_block <= 90
    assert used.growth <= 1.1


def test_keys_of_all_figures_and_ratios_of_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_workloads, "BLOCKS", 128)
    python = tmp_path / "dynamo" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho \'{"typ_p50_us": 50, "hot_p50_us": 80}\'\n')
    python.chmod(0o755)
    figures = router.run_router_bench(tmp_path, rounds=20, blocks=5000)
    assert figures["router.vs_dynamo.typ"] == pytest.approx(figures["router.decide.typ_p50_us"] / 50)
    assert figures["router.vs_dynamo.hot"] == pytest.approx(figures["router.decide.hot_p50_us"] / 80)
    assert figures["router.vs_ray.typ"] > 0, "Ray's tree loads without Ray Serve"
    assert figures["router.bytes_per_block"] > 30
    assert figures["router.reports.blocks_per_s"] > 0


def test_an_absent_peer_is_left_out_in_a_sentence(tmp_path: Path) -> None:
    said: list[str] = []
    assert router._against("dynamo", tmp_path / "python", (1, 1, 1, 1), {}, said.append) == {}
    assert said == [f"dynamo is left out: {tmp_path / 'python'} doesn't exist (make peers)"]


def test_decisions_are_counted() -> None:
    made = decide(8, 20)
    assert len(made.times) == 20
    assert made.quantile(0.0) == min(made.times)
    assert made.quantile(1.0) == max(made.times)
