"""`tandem demo`: a cluster of two workers plays the scripted conversation and shows what was reused.

Everything goes through the public gRPC API, as any client's requests do.
"""

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.answer import Answer
from cluster.cli.bench import JsonFile
from cluster.cli.connection import stream_answer
from cluster.cli.demo_script import MAX_TOKENS, TURNS, Message
from cluster.cli.flags import model_flag, speculative_flag
from cluster.cli.launch import running_cluster
from cluster.cli.render import answer_line, answers_table
from cluster.cli.serve import SpeculativeOption
from cluster.config import load_config
from cluster.rpc.client import TandemClient


def demo(
    json_file: JsonFile = None,
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Play it without drafting.")] = False,
    model: Annotated[Path | None, typer.Option(metavar="DIR", help="Another model. Default: the demo model.")] = None,
    speculative_config: SpeculativeOption = None,
    workers: Annotated[str, typer.Option(metavar="N", help="Workers to start.")] = "2",
    port: Annotated[str, typer.Option(metavar="PORT", help="Port of the gateway; 0 takes a free one.")] = "0",
) -> None:
    """Start a cluster, play a short conversation on it, and stop it."""
    speculative = {"speculative": {"method": "none"}} if no_speculation else speculative_flag(speculative_config)
    sections = {"cluster": {"workers": workers, "port": port}, "log_level": "warning"}
    config = load_config({**sections, **model_flag(model), **speculative})
    console = Console(highlight=False)
    with running_cluster(config, console) as cluster:
        answers = asyncio.run(_play(cluster.endpoint, cluster.api_key, console))
        console.print(answers_table(answers), new_line_start=True)
    if json_file:
        document = {"requests": [asdict(answer) for answer in answers]}
        json_file.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


async def _play(endpoint: str, api_key: str | None, console: Console) -> list[Answer]:
    """All turns in order; each answer is shown as it comes, with a line of figures under it."""

    def show(piece: str) -> None:
        console.print(piece, end="", markup=False, soft_wrap=True)

    answers: list[Answer] = []
    so_far: list[Message] = []
    async with TandemClient(endpoint, api_key) as client:
        for number, turn in enumerate(TURNS, 1):
            messages = turn.messages(so_far)
            console.print(f"\n{number}. {turn.title}", style="bold")
            console.print(f"> {turn.user}", style="cyan", markup=False)
            text, completion = await stream_answer(client, messages, show, temperature=0.0, max_tokens=MAX_TOKENS)
            so_far = [*messages, {"role": "assistant", "content": text}]
            answers.append(Answer.of(text, completion))
            console.print(f"\n{answer_line(answers[-1])}", style="dim", markup=False, soft_wrap=True)
    return answers
