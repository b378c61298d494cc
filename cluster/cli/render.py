"""What the commands print about a cluster and about answers: the start-up box, status tables, the demo's lines.

Pure: protobuf messages and values in, rich renderables or strings out. Invariant: a number is printed with its unit,
and what does not exist (no draft pool, no speculation) as a dash. Used by all commands that talk to a cluster.
"""

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.panel import Panel
from rich.table import Table

from cluster.cli.answer import Answer
from cluster.rpc._generated.tandem.v1 import tandem_pb2 as pb


def cluster_box(status: pb.ClusterStatusResponse, endpoint: str) -> Panel:
    """Model, pools, lookahead span and endpoints of a cluster."""
    model = status.model
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row("model", f"{model.name}, up to {model.max_len:,} tokens")
    grid.add_row("speculation", _speculation(model))
    for pool in status.workers[0].pools if status.workers else ():
        grid.add_row(f"{pool.name} pool", pool_size(pool))
    grid.add_row("lookahead", lookahead(model))
    grid.add_row("workers", str(len(status.workers)))
    grid.add_row("endpoint", f"grpc://{endpoint}  (tandem.v1.TandemService, grpc.health.v1, reflection)")
    grid.add_row("directory", "up" if status.directory_up else "down: requests are placed from memory")
    return Panel(grid, title=f"Tandem {status.version}", title_align="left", expand=False)


def workers_table(workers: Iterable[pb.Worker]) -> Table:
    """One row for each worker: state, load, and how full its pools are."""
    table = _table("Pools: blocks in use / cached / free", "worker", "state", "running", "waiting", "target", "draft")
    for worker in workers:
        pools = {pool.name: pool for pool in worker.pools}
        state = pb.WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
        load = (str(worker.running_requests), str(worker.waiting_requests))
        table.add_row(worker.worker_id, state, *load, _fill(pools.get("target")), _fill(pools.get("draft")))
    return table


def pool_size(pool: pb.Pool) -> str:
    """Blocks, tokens and MiB of a pool: `1,024 blocks of 16 = 16,384 tokens, 720 MiB per worker`."""
    tokens, mib = pool.total_blocks * pool.block_size, pool.bytes / 2**20
    return f"{pool.total_blocks:,} blocks of {pool.block_size} = {tokens:,} tokens, {mib:,.1f} MiB per worker"


def lookahead(model: pb.Model) -> str:
    """The span of the draft's KV, and what it costs in reuse."""
    if not model.HasField("lookahead_span"):
        return "none: there is no draft KV"
    span = model.lookahead_span
    if span == 0:
        return "0 tokens: draft KV is reusable wherever target KV is"
    plural = "token" if span == 1 else "tokens"
    return f"{span} {plural}: where two prompts part, the draft can reuse {span} {plural} less than the target"


def answer_line(answer: Answer) -> str:
    """The line under an answer."""
    return (
        f"{answer.worker}: {answer.prompt_tokens} prompt tokens, reused {answer.reused_target} target / "
        f"{answer.reused_draft} draft / {answer.reused_joint} joint; "
        f"{dash(answer.acceptance, '.2f')} tokens a step, first token after {answer.ttft_s:.2f} s, "
        f"{answer.tokens_per_s:.1f} tokens/s"
    )


def answers_table(answers: Sequence[Answer]) -> Table:
    """The demo's last word: one row for each request."""
    table = _table("Tokens of the prompt, and those reused from either pool and from both", "", "worker")
    for name in ("prompt", "target", "draft", "joint", "tokens/step", "TTFT s", "tokens/s"):
        table.add_column(name, justify="right")
    for number, answer in enumerate(answers, 1):
        reused = (str(answer.reused_target), str(answer.reused_draft), str(answer.reused_joint))
        speed = (dash(answer.acceptance, ".2f"), f"{answer.ttft_s:.2f}", f"{answer.tokens_per_s:.1f}")
        table.add_row(str(number), answer.worker, str(answer.prompt_tokens), *reused, *speed)
    return table


def comparison_table(rows: Iterable[tuple[str, str, str, str]]) -> Table:
    """What was compared, both values, and the ratio of the first to the second."""
    table = _table(
        "Ratio: the first named over the second, median over the rounds", "measured", "first", "second", "ratio"
    )
    for row in rows:
        table.add_row(*row)
    return table


def figures_table(figures: Mapping[str, float], caption: str) -> Table:
    """Figures by their keys."""
    table = _table(caption, "figure", "value")
    for key, value in figures.items():
        table.add_row(key, f"{value:.4g}")
    return table


def dash(value: float | None, form: str = "") -> str:
    """The number, or a dash if there is none."""
    return "-" if value is None else format(value, form)


def _table(caption: str, *columns: str) -> Table:
    return Table(*columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), caption=caption, caption_justify="left")


def _speculation(model: pb.Model) -> str:
    if model.speculation_method == "none":
        return "off"
    draft = f" by {model.draft}" if model.HasField("draft") else ""
    return f"{model.speculation_method}{draft}, {model.num_speculative_tokens} tokens drafted in each step"


def _fill(pool: pb.Pool | None) -> str:
    return "-" if pool is None else f"{pool.in_use_blocks:,} / {pool.cached_blocks:,} / {pool.free_blocks:,}"
