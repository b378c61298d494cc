"""`tandem generate`: one prompt to a running cluster; the answer streams to stdout, its figures go to stderr."""

import asyncio
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
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    api_key: ApiKey = None,
) -> None:
    """Ask a running cluster one thing."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": text}]
    asked: Prompt = text if raw else messages
    form = structured_output(json_schema, json_object, regex, ebnf)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}

    async def ask() -> str:
        async with TandemClient(endpoint, api_key) as client:
            answer, completion = await stream_answer(
                client, asked, _show, stop=stop or [], structured_output=form, **sampling
            )
            return answer_line(Answer.of(answer, completion))

    figures = asyncio.run(ask())
    print(flush=True)
    Console(stderr=True).print(figures, style="dim", markup=False, highlight=False, soft_wrap=True)


def _show(piece: str) -> None:
    print(piece, end="", flush=True)
