"""`tandem generate`: one prompt to a running cluster; the answer streams to stdout, its figures go to stderr."""

import asyncio
import secrets
import sys
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.answer import Answer
from cluster.cli.connection import (
    DEFAULT_ENDPOINT,
    ApiKey,
    Endpoint,
    MaxTokens,
    Seed,
    Temperature,
    TopK,
    TopP,
    stream_answer,
)
from cluster.cli.render import answer_line
from cluster.cli.structured import Ebnf, JsonObject, JsonSchema, Regex, structured_output
from cluster.rpc.client import Prompt, TandemClient


def generate(
    prompt: Annotated[str, typer.Argument(help="What to say to the model; - reads it from stdin.")],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")] = None,
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    ebnf: Ebnf = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    worker: Annotated[str, typer.Option(metavar="ID", help="The only worker that may take it.")] = "",
    priority: Annotated[int | None, typer.Option(metavar="N", help="Lower goes first; -100 to 100.")] = None,
    deadline: Annotated[float | None, typer.Option(metavar="S", min=0.001, help="Give up after so long.")] = None,
    request_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Name of the request, for `tandem explain` and logs.")
    ] = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    api_key: ApiKey = None,
) -> None:
    """Ask a running cluster one thing."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    asked: Prompt = text if raw else messages
    form = structured_output(json_schema, json_object, regex, ebnf)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}

    name = request_id or f"cli-{secrets.token_hex(6)}"
    options = {"request_id": name, "worker_id": worker, "priority": priority, "timeout_s": deadline}

    async def ask() -> str:
        async with TandemClient(endpoint, api_key) as client:
            answer, completion = await stream_answer(
                client, asked, _show, stop=stop or [], structured_output=form, **sampling, **options
            )
            return f"{answer_line(Answer.of(answer, completion))}; request {name}"

    figures = asyncio.run(ask())
    print(flush=True)
    Console(stderr=True).print(figures, style="dim", markup=False, highlight=False, soft_wrap=True)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)
