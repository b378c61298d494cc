"""Progress on a terminal while something is loading: a line for each stage, with the time that it took.

Invariant: a stage that ended is one line, whether the output is a terminal (where the running stage has a spinner) or a
file. Used by `serve` and `demo`, which hand it to whatever starts the cluster.
"""

import time
from types import TracebackType

from rich.console import Console
from rich.status import Status


class Stages:
    """Call it with the name of each stage as it begins; as a context manager it closes the last one."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._name: str | None = None
        self._began = 0.0
        self._spinner: Status | None = None

    def __enter__(self) -> "Stages":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._finish("✗" if kind else "✓")

    def __call__(self, name: str) -> None:
        """The stage `name` begins, and the one before has ended well."""
        self._finish("✓")
        self._name, self._began = name, time.monotonic()
        if self._console.is_terminal:
            self._spinner = self._console.status(f"{name} …")
            self._spinner.start()

    def _finish(self, mark: str) -> None:
        if self._spinner:
            self._spinner.stop()
            self._spinner = None
        if self._name:
            took = time.monotonic() - self._began
            self._console.print(f"{mark} {self._name} ({took:.1f} s)", markup=False, highlight=False)
            self._name = None
