"""`tandem bench core`: its figures are there, and its simulation of forks agrees with the real caches."""

from pathlib import Path

import pytest

from cluster.bench import core, core_workloads
from cluster.bench.core import run_core_bench
from cluster.bench.forks import SCHEMES, compare, workload
from tests.unit.core.oracle import make_pair, start


@pytest.mark.parametrize("span", [1, 3])
def test_the_exact_scheme_is_what_the_real_caches_do(span: int) -> None:
    requests = workload(families=4, size=5)
    oracle, reused = make_pair(span, block_size=16, blocks=2000), 0
    for request in requests:
        sequence = start(oracle, request.tokens, use_draft=not request.plain)
        reused += sequence.handle.cursor("target")
        sequence.finish_prefill()
        sequence.end()
    oracle.check_published()
    exact = compare(requests, span)["exact"]
    assert exact.wrong_cells == 0
    assert exact.reuse == pytest.approx(reused / sum(len(request.tokens) for request in requests))


@pytest.mark.parametrize("span", [1, 2, 4])
def test_exact_keys_reuse_the_most_and_are_never_wrong(span: int) -> None:
    outcomes = compare(workload(families=8), span)
    exact = outcomes["exact"]
    assert exact.wrong_cells == 0
    assert all(exact.reuse > outcomes[scheme].reuse for scheme in SCHEMES if scheme != "exact")
    assert outcomes["backoff"].wrong_cells > 0, "the workload has the forks that raw keys get wrong"


def test_all_figures_come_without_peers_and_absent_peers_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_workloads, "PROMPT_TOKENS", 1024)
    said: list[str] = []
    figures = run_core_bench(peers=tmp_path, rounds=1, tell=said.append)
    assert all(value >= 0 for value in figures.values())
    assert {"core.claim_cycle.ms", "core.evict.ms", "core.decode_step.us", "core.bytes_per_block"} <= set(figures)
    assert {f"forks.{scheme}.{kind}" for scheme in SCHEMES for kind in ("reuse", "wrong_cells")} <= set(figures)
    assert figures["core.bytes_per_block"] <= 400
    assert [line.split()[0] for line in said] == ["vllm", "sglang"]
    assert not any("vs_" in key for key in figures)


def test_ratios_are_ours_over_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_workloads, "PROMPT_TOKENS", 1024)
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho \'{"claim_cycle.ms": 8, "evict.ms": 4, "decode_step.us": 2}\'\n')
    python.chmod(0o755)
    figures = core.run_core_bench(peers=tmp_path, rounds=1)
    assert figures["core.evict.vllm_ms"] == 4
    assert figures["core.evict.vs_vllm"] == pytest.approx(figures["core.evict.ms"] / 4)
    assert figures["core.decode_step.vs_vllm"] == pytest.approx(figures["core.decode_step.us"] / 2)
