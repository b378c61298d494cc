"""Exit codes of `tandem`, which scripts may rely on. Invariant: each means one thing. Used by `main`."""

from enum import IntEnum

from cluster.errors import (
    CapacityExceeded,
    ConfigError,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    TandemError,
    Unauthenticated,
    Unavailable,
)


class ExitCode(IntEnum):
    """What became of the command."""

    OK = 0
    """It did what it was asked to."""
    FAILED = 1
    """A defect, or an error that has no code of its own."""
    CONFIG = 2
    """Wrong option, configuration, request or API key."""
    MODEL = 3
    """The model or draft can't be loaded, or no such model is served."""
    UNAVAILABLE = 4
    """The cluster doesn't answer, didn't come up, or is full."""
    INTERRUPTED = 130
    """Ctrl-C."""
    TERMINATED = 143
    """SIGTERM, or the terminal was closed (SIGHUP)."""


def exit_code(error: TandemError) -> ExitCode:
    """The code that a command which failed with `error` exits with."""
    match error:
        case ConfigError() | InvalidRequest() | Unauthenticated():
            return ExitCode.CONFIG
        case ModelLoadError() | ModelNotFound():
            return ExitCode.MODEL
        case Unavailable() | CapacityExceeded():
            return ExitCode.UNAVAILABLE
        case _:
            return ExitCode.FAILED
