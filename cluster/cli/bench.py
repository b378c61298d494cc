"""`tandem bench …`: measurements, printed as a table and, with `--json`, written as flat keys."""

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from cluster.bench.engine import BenchModel

bench = typer.Typer(help="Measure.", no_args_is_help=True)
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there as well.")]
_TINY = Path(__file__).parents[2] / "tests" / "fixtures" / "models"


class BenchTarget(StrEnum):
    """Which models can be measured by name."""

    TINY = "tiny"
    DEMO = "demo"


@bench.command()
def engine(
    model: Annotated[
        list[BenchTarget] | None, typer.Option(help="Model to measure; repeatable. Default: both, the demo model last.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times that each comparison is made.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads for tensor operations.")] = None,
    json_file: JsonFile = None,
) -> None:
    """The engine against transformers' generate(), warm prefixes against cold, speculation against none."""
    from transformers.utils import logging

    from cluster.bench.engine import Effort, run_engine_bench
    from cluster.cli.render import comparison_table

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading weights, drawn over ours
    console = Console(highlight=False)
    models = [_bench_model(name) for name in (model or list(BenchTarget))]
    with console.status("") as status:
        report = run_engine_bench(models, Effort(rounds=rounds, threads=threads), status.update)
    console.print(comparison_table(report.rows))
    if json_file:
        json_file.write_text(json.dumps(report.figures, indent=2) + "\n", encoding="utf-8")


@bench.command()
def core(
    peers: Annotated[Path, typer.Option(metavar="DIR", help="Environments of the peers: DIR/vllm, DIR/sglang.")] = Path(
        ".peers"
    ),
    rounds: Annotated[int, typer.Option(min=1, max=1000, help="Times that each measurement is made.")] = 15,
    json_file: JsonFile = None,
) -> None:
    """The paired caches against vLLM's and SGLang's, in CPU time; what exact keys are worth where prompts fork."""
    from cluster.bench.core import run_core_bench
    from cluster.cli.render import figures_table

    console = Console(highlight=False)
    with console.status("measuring the caches") as status:
        figures = run_core_bench(peers, rounds, console.print)
        status.stop()
    console.print(figures_table(figures))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def _bench_model(name: BenchTarget) -> "BenchModel":
    from cluster.bench.engine import BenchModel
    from cluster.models.demo import demo_draft, demo_target

    if name is BenchTarget.DEMO:
        return BenchModel("demo", demo_target(), demo_draft())
    if not _TINY.is_dir():
        raise ConfigError("model is tiny, which only a source checkout has: measure the demo model (--model demo).")
    return BenchModel("tiny", _TINY / "tiny-target", _TINY / "tiny-eagle3")
