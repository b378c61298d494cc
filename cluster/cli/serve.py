"""`tandem serve`: a cluster on this machine until Ctrl-C."""

import signal
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.cli.flags import Flags, model_flag, speculative_flag, with_config_flags
from cluster.cli.launch import running_cluster
from cluster.config import load_config

SpeculativeOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help='How to speculate, such as \'{"method": "eagle3", "model": "DIR", "num_speculative_tokens": 3}\'.',
    ),
]


@with_config_flags
def serve(
    model: Annotated[Path | None, typer.Argument(help="Folder of the target model. Default: the demo model.")] = None,
    speculative_config: SpeculativeOption = None,
    *,
    flags: Flags,
) -> None:
    """Serve a model until Ctrl-C."""
    config = load_config({**flags, **model_flag(model), **speculative_flag(speculative_config)})
    with running_cluster(config, Console()):
        while True:  # until a signal raises KeyboardInterrupt or SystemExit here
            signal.pause()
