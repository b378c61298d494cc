"""The cost of placing a request, against Dynamo's RadixTree and Ray Serve's PrefixTree in the same run.

    router.decide.{typ,hot}_p50_us, _p99_us    a whole decision: depths, costs, choice, reservation
    router.decisions_per_s                     typical decisions one after the other, by CPU time
    router.reports.blocks_per_s                blocks that reports bring into the map, by CPU time
    router.bytes_per_block                     memory of the map for each unique block
    router.churn_growth                        its memory after three times its blocks came and went; 1 is flat
    router.{dynamo,ray}.{typ,hot}_p50_us       the peers' lookup alone, of the same prompt and holders
    router.vs_dynamo.{typ,hot}, router.vs_ray  our whole decision over that lookup
    router.actor_decisions_per_s, router.actor_p50_ms, _p99_ms    through the scheduler's Ray actor

The prompt has 4,096 blocks, the cluster 256 workers. Typical: 8 hold the prompt; hot: all do, to depths of their own.
Dynamo's binding runs in an environment of its own (`<peers>/dynamo`); a peer that is absent is left out. One thread,
wall time if not said otherwise. Called by `tandem bench router`, which adds what the actor does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from cluster.bench import router_workloads as ours

_SCRIPTS = Path(__file__).parent / "peer_scripts"
_PEER_TIMEOUT_S = 600
_CHARACTERS_PER_TOKEN = 4


def run_router_bench(
    peers: Path, rounds: int, blocks: int, tell: Callable[[str], None] = lambda _: None
) -> dict[str, float]:
    """All figures of this process and of the peers, by their keys; `blocks` is how many the map holds when its memory
    is measured. `tell` gets a line for each peer that is left out."""
    figures: dict[str, float] = {}
    for kind, holders in (("typ", ours.TYPICAL_HOLDERS), ("hot", ours.WORKERS)):
        decisions = ours.decide(holders, rounds)
        figures[f"router.decide.{kind}_p50_us"] = 1e6 * decisions.quantile(0.5)
        figures[f"router.decide.{kind}_p99_us"] = 1e6 * decisions.quantile(0.99)
        if kind == "typ":
            figures["router.decisions_per_s"] = decisions.rate
    figures["router.reports.blocks_per_s"] = ours.absorb(rounds)
    memory = ours.memory(blocks)
    figures["router.bytes_per_block"] = memory.bytes_per_block
    figures["router.churn_growth"] = memory.growth
    sizes = (ours.WORKERS, ours.TYPICAL_HOLDERS)
    figures |= _against("dynamo", peers / "dynamo" / "bin" / "python", (ours.BLOCKS, *sizes, 300), figures, tell)
    characters = ours.BLOCKS * ours.BLOCK_SIZE * _CHARACTERS_PER_TOKEN
    figures |= _against("ray", Path(sys.executable), (characters, *sizes, 15), figures, tell)
    return figures


def _against(
    peer: str, python: Path, sizes: tuple[int, ...], figures: dict[str, float], tell: Callable[[str], None]
) -> dict[str, float]:
    """The peer's figures and the ratios of ours to them."""
    if not python.exists():
        tell(f"{peer} is left out: {python} doesn't exist (make peers)")
        return {}
    command = [str(python), str(_SCRIPTS / f"{peer}_router.py"), *map(str, sizes)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_PEER_TIMEOUT_S, check=False)
    if result.returncode:
        tell(f"{peer} is left out: its script failed ({result.stderr.strip().splitlines()[-1:]})")
        return {}
    theirs = json.loads(result.stdout.strip().splitlines()[-1])
    measured: dict[str, float] = {}
    for kind in ("typ", "hot"):
        measured[f"router.{peer}.{kind}_p50_us"] = theirs[f"{kind}_p50_us"]
        measured[f"router.vs_{peer}.{kind}"] = figures[f"router.decide.{kind}_p50_us"] / theirs[f"{kind}_p50_us"]
    return measured
