"""Entry point of `tandem`: the subcommands, and what every one of them does about errors and signals.

Invariant: a user's mistake ends in one sentence on stderr and the exit code of its kind, never in a traceback; SIGTERM
and SIGHUP unwind the stack as Ctrl-C does, so whatever a command started is stopped. Subcommands import heavy libraries
only inside their functions, which keeps `--help` fast.
"""

import signal
import sys
from types import FrameType

import typer
from rich.console import Console

from cluster.cli.bench import bench
from cluster.cli.chat import chat
from cluster.cli.demo import demo
from cluster.cli.draft import draft
from cluster.cli.exit_codes import ExitCode, exit_code
from cluster.cli.explain import explain
from cluster.cli.generate import generate
from cluster.cli.serve import serve
from cluster.cli.status import status
from cluster.errors import TandemError

app = typer.Typer(
    help="LLM serving with speculative decoding and paired target/draft KV pools.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (serve, generate, chat, status, explain, demo):
    app.command()(_command)
app.add_typer(bench, name="bench")
app.add_typer(draft, name="draft")


def main() -> None:
    """Runs one command and exits with its code (see `exit_codes`)."""
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup, where the command outlives the terminal
        signal.signal(signal.SIGHUP, _terminate)
    try:
        app()
    except TandemError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(exit_code(error))


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)


if __name__ == "__main__":
    main()
