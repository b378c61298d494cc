"""`tandem chat`: a conversation with a running cluster on the terminal.

Invariant: the history holds complete turns only; an answer that was interrupted with Ctrl-C is taken back together with
its question.
"""

import asyncio
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
    TopP,
    cluster_status,
    stream_answer,
)
from cluster.cli.demo_script import Message
from cluster.cli.render import answer_line
from cluster.errors import TandemError
from cluster.rpc.client import TandemClient

_HELP = """\
/clear   forget the conversation (the system prompt stays)
/help    this list
/exit    end; Ctrl-D does too
Ctrl-C while the model answers stops the answer."""


def chat(
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    endpoint: Endpoint = DEFAULT_ENDPOINT,
    api_key: ApiKey = None,
) -> None:
    """Talk with the model of a running cluster."""
    console = Console(highlight=False)
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    with asyncio.Runner() as runner:
        status = runner.run(cluster_status(endpoint, api_key))
        console.print(f"{status.model.name}; /help lists the commands", style="dim", markup=False)
        client = runner.run(_connect(endpoint, api_key))
        try:
            _Conversation(console, runner, client, system, sampling).run()
        finally:
            runner.run(client.close())


async def _connect(endpoint: str, api_key: str | None) -> TandemClient:
    return TandemClient(endpoint, api_key)  # made inside the loop that it is going to belong to


class _Conversation:
    def __init__(
        self,
        console: Console,
        runner: asyncio.Runner,
        client: TandemClient,
        system: str | None,
        sampling: dict[str, float | None],
    ) -> None:
        self._console, self._runner, self._client, self._sampling = console, runner, client, sampling
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._history = list(self._start)

    def run(self) -> None:
        while True:
            try:
                line = self._console.input("[bold cyan]> [/]").strip()
            except EOFError:
                return
            match line:
                case "":
                    continue
                case "/exit":
                    return
                case "/help":
                    self._console.print(_HELP, markup=False)
                case "/clear":
                    self._history = list(self._start)
                case _ if line.startswith("/"):
                    self._console.print(f"{line} is no command; /help lists them", markup=False)
                case _:
                    self._answer(line)

    def _answer(self, question: str) -> None:
        asked: list[Message] = [*self._history, {"role": "user", "content": question}]
        try:
            text, completion = self._runner.run(stream_answer(self._client, asked, self._show, **self._sampling))
        except KeyboardInterrupt:
            self._console.print("\n(stopped; the question is taken back)", style="dim")
        except TandemError as error:
            self._console.print(f"error: {error}", style="red", markup=False)
        else:
            self._history = [*asked, {"role": "assistant", "content": text}]
            self._console.print(
                f"\n{answer_line(Answer.of(text, completion))}", style="dim", markup=False, soft_wrap=True
            )

    def _show(self, piece: str) -> None:
        self._console.print(piece, end="", markup=False, soft_wrap=True)
