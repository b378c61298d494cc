"""The paired caches against vLLM's cache manager and SGLang's radix tree, and what exact keys are worth.

Peers run in environments of their own (`<peers>/vllm`, `<peers>/sglang`), with a script that does the same work on
the same prompt in the same run; one that is absent is left out. All times are CPU time of one thread, the best of
several rounds.

    core.claim_cycle.ms, .vs_vllm    hash a 32,768-token prompt, full-hit claim, reserve and free; vLLM: in its one pool
    core.claim_cycle.unhashed_ms     the same in the worker, which compares units and needs no keys for what is cached
    core.claim.ms, .vs_sglang        the lookup alone
    core.turn.ms                     a known prompt that is 256 tokens longer
    core.evict.ms, .vs_vllm          an unknown prompt into full pools: miss, evict, allocate, publish
    core.decode_step.us, .vs_vllm    append, reserve and commit of one request
    core.decode_step.of_<N>_us       the same, of one among N that run in turns
    core.decode_step.cached_<N>_us   the same, beside N cached blocks in each pool
    core.bytes_per_block             bytes in both trees for each cached block, reports' bookkeeping included
    forks.<scheme>.reuse, .wrong_cells    see `forks.py`

Tandem's figures are for both pools. Ratios are ours over theirs: below 1 Tandem is faster. Called by
`tandem bench core`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.bench import core_workloads as ours
from cluster.bench.forks import compare, workload

_SCRIPTS = Path(__file__).parent / "peer_scripts"
_PEER_TIMEOUT_S = 600


def run_core_bench(
    peers: Path = Path(".peers"), rounds: int = 15, tell: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """All figures by their keys. `tell` gets a line for each peer that is left out."""
    claim = ours.claim_cycle(rounds)
    figures = {
        "core.claim_cycle.ms": 1e3 * claim["hashed"],
        "core.claim_cycle.unhashed_ms": 1e3 * claim["unhashed"],
        "core.claim.ms": 1e3 * claim["lookup"],
        "core.turn.ms": 1e3 * ours.turn(rounds),
        "core.evict.ms": 1e3 * ours.evict_cycle(rounds),
        "core.decode_step.us": 1e6 * ours.decode_step(4000),
    }
    for running in (8, 64, 256):
        figures[f"core.decode_step.of_{running}_us"] = 1e6 * ours.decode_step(6400 // running, running=running)
    for cached in (1_000, 100_000):
        figures[f"core.decode_step.cached_{cached}_us"] = 1e6 * ours.decode_step(4000, cached=cached)
    figures["core.bytes_per_block"] = ours.bytes_per_block()
    figures |= _against("vllm", {"claim_cycle.ms", "evict.ms", "decode_step.us"}, figures, peers, tell)
    figures |= _against("sglang", {"claim.ms"}, figures, peers, tell)
    for scheme, outcome in compare(workload()).items():
        figures[f"forks.{scheme}.reuse"] = outcome.reuse
        figures[f"forks.{scheme}.wrong_cells"] = outcome.wrong_cells
    return figures


def _against(
    peer: str, keys: set[str], figures: dict[str, float], peers: Path, tell: Callable[[str], None]
) -> dict[str, float]:
    """The peer's figures and the ratios to ours."""
    python = peers / peer / "bin" / "python"
    if not python.exists():
        tell(f"{peer} is left out: {python} doesn't exist (make peers)")
        return {}
    command = [str(python), str(_SCRIPTS / f"{peer}_core.py"), str(ours.PROMPT_TOKENS), str(ours.BLOCK_SIZE)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_PEER_TIMEOUT_S, check=False)
    if result.returncode:
        tell(f"{peer} is left out: its script failed ({result.stderr.strip().splitlines()[-1:]})")
        return {}
    theirs = json.loads(result.stdout.strip().splitlines()[-1])
    measured: dict[str, float] = {}
    for key in sorted(keys):
        name = key.rsplit(".", 1)[0]
        measured[f"core.{name}.{peer}_{key.rsplit('.', 1)[1]}"] = theirs[key]
        measured[f"core.{name}.vs_{peer}"] = figures[f"core.{key}"] / theirs[key]
    return measured
