"""`tandem bench`: a table for people, flat keys for scripts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.cli_process import ROOT

KEYS = ["engine.tiny.b1.vs_generate", "engine.tiny.b8.vs_generate", "engine.tiny.b32.vs_generate"]
KEYS += ["ttft.warm_over_cold", "spec.vs_none", "spec.acceptance"]


@pytest.mark.slow
def test_bench_engine_prints_a_table_and_writes_flat_keys(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    arguments = ["bench", "engine", "--model", "tiny", "--rounds", "1", "--threads", "1", "--json", str(path)]
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr
    figures = json.loads(path.read_text())
    assert all(figures[key] > 0 for key in KEYS)
    assert figures["ttft.warm_over_cold"] < 1
    assert 1 <= figures["spec.acceptance"] <= 4
    assert all(words in result.stdout for words in ("generate()", "warm, cold", "eagle3, none", "ratio"))
