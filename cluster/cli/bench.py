"""`tandem bench …`: measurements, printed as a table and, with `--json`, written as flat keys."""

import json
from dataclasses import replace
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
def modes(
    target: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Target model. Default: the tests' tiny one.")
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(metavar="MODE=DIR", help="Draft of a mode; repeatable. Default: the tests' tiny ones."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Times that each prompt is new.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads for tensor operations.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Every speculation mode: tokens a step, speed against none, draft KV, and what a chat reuses."""
    from transformers.utils import logging

    from cluster.bench.modes import ModeEffort, modes_of, run_modes_bench
    from cluster.cli.bench_modes import drafts_by_mode, modes_table, tiny_models

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading weights, drawn over ours
    console = Console(highlight=False)
    folder, drafts = (target, {}) if target else tiny_models(_TINY)
    chosen = modes_of({**drafts, **drafts_by_mode(draft or ())}, console.print)
    with console.status("") as status:
        figures = run_modes_bench(folder, chosen, ModeEffort(rounds=rounds, threads=threads), status.update)
    console.print(modes_table(figures))
    if json_file:
        keys = {key: value for mode, found in figures.items() for key, value in found.keys(mode).items()}
        json_file.write_text(json.dumps(keys, indent=2) + "\n", encoding="utf-8")


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
    console.print(figures_table(figures, "CPU time of one thread, best of all rounds; vs_<peer> is ours over theirs"))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@bench.command()
def router(
    peers: Annotated[Path, typer.Option(metavar="DIR", help="Environments of the peers: DIR/dynamo.")] = Path(".peers"),
    rounds: Annotated[int, typer.Option(min=10, max=1_000_000, help="Decisions of each measurement.")] = 2000,
    blocks: Annotated[
        int, typer.Option(min=1000, max=100_000_000, help="Blocks in the map when its memory is measured.")
    ] = 400_000,
    actor: Annotated[bool, typer.Option(help="Measure the scheduler's Ray actor as well.")] = True,
    json_file: JsonFile = None,
) -> None:
    """What placing a request costs, against Dynamo's and Ray Serve's prefix trees."""
    from cluster.bench.router import run_router_bench
    from cluster.cli.render import figures_table

    console = Console(highlight=False)
    with console.status("measuring the router") as status:
        figures = run_router_bench(peers, rounds, blocks, console.print)
        if actor:
            from actors.router_load import run_actor_bench

            status.update("measuring the scheduler's actor")
            figures |= run_actor_bench(rounds)
    console.print(figures_table(figures, "Wall time of one thread; vs_<peer> is our whole decision over their lookup"))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@bench.command()
def route(
    workload: Annotated[
        list[str] | None, typer.Option(help="Workload to run; repeatable. Default: all, those of --traces included.")
    ] = None,
    workers: Annotated[list[int] | None, typer.Option(min=1, max=4096, help="Cluster size; repeatable.")] = None,
    policy: Annotated[list[str] | None, typer.Option(help="Router to run; repeatable. Default: all.")] = None,
    traces: Annotated[
        Path, typer.Option(metavar="DIR", help="Public traces: DIR/mooncake/*.jsonl, DIR/azure/*.csv.")
    ] = Path("../shared/data"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Runs of each case, on other requests each time.")] = 5,
    load: Annotated[
        float, typer.Option(min=0.01, max=2.0, help="Share of the cluster's time that the work needs.")
    ] = 0.6,
    requests: Annotated[
        int, typer.Option(min=10, max=1_000_000, help="Requests of a run on 8 workers; more workers get more.")
    ] = 2000,
    slo_ttft: Annotated[float, typer.Option(min=0.001, help="Seconds to the first token that count as good.")] = 4.0,
    slo_per_token: Annotated[float, typer.Option(min=0.0001, help="Seconds a token, after it, that do.")] = 0.1,
    jobs: Annotated[int, typer.Option(min=1, max=256, help="Processes to spread the runs over.")] = 1,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the comparison there, as SVG.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Tandem's router against the public ones, on a simulated cluster with paired KV pools."""
    from cluster.bench.route.chart import chart
    from cluster.bench.route.matrix import run_matrix
    from cluster.bench.route.metrics import Objective
    from cluster.bench.route.report import flat_keys
    from cluster.cli.bench_route import route_setup, route_tables

    console = Console(highlight=False)
    setup = route_setup(
        workload,
        workers,
        policy,
        traces,
        console.print,
        seeds=seeds,
        load=load,
        requests=requests,
        objective=Objective(slo_ttft, slo_per_token),
    )
    with console.status("") as status:
        results = run_matrix(setup, jobs, status.update)
    for table in route_tables(results):
        Console(highlight=False, width=max(console.width, 168)).print(table)
    if plot:
        plot.write_text(chart(results), encoding="utf-8")
    if json_file:
        json_file.write_text(json.dumps(flat_keys(results), indent=2) + "\n", encoding="utf-8")


@bench.command()
def gap(
    model: Annotated[BenchTarget, typer.Option(help="Model to measure, with its EAGLE3 draft.")] = BenchTarget.DEMO,
    context: Annotated[int, typer.Option(min=1, max=100_000, help="Tokens of the chat that was evicted.")] = 1000,
    new_tokens: Annotated[int, typer.Option(min=1, max=10_000, help="Tokens of the answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Chats that each choice is measured on.")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, max=1024, help="Threads for tensor operations.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Long chats whose draft blocks were evicted, for each choice of speculative.draft_gap."""
    from transformers.utils import logging

    from cluster.bench.draft_gap import TINY_QUESTIONS, GapCase, run_gap_bench
    from cluster.cli.render import figures_table

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # of loading weights, drawn over ours
    console = Console(highlight=False)
    measured = _bench_model(model)
    if model is BenchTarget.TINY:
        measured = replace(measured, questions=TINY_QUESTIONS)
    with console.status("") as status:
        figures = run_gap_bench(measured, GapCase(context, new_tokens, rounds, threads), status.update)
    console.print(figures_table(figures, f"draft_gap of {model}: seconds, medians of {rounds} rounds; tokens a step"))
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
