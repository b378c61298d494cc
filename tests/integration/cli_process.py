"""A `tandem` command as a process of its own, and proof that it left nothing behind."""

import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "tests" / "fixtures" / "models"
EAGLE3 = f'{{"method": "eagle3", "model": "{MODELS / "tiny-eagle3"}", "num_speculative_tokens": 3}}'
_MARK = "_TANDEM_CLI_TEST"
_RUNTIME = "_TANDEM_RUNTIME"


class TandemProcess:
    """Runs the command; its output is collected while it runs."""

    def __init__(self, *arguments: str) -> None:
        self._mark = secrets.token_hex(8)
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cluster.cli.main", *arguments],
            cwd=ROOT,
            env={**users_environment(), _MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        """Everything printed so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, words: str, limit_s: float = 120.0) -> str:
        """The output once `words` are in it; fails if the command ends, or the time, before that."""
        with self._changed:
            found = self._changed.wait_for(
                lambda: words in "".join(self._lines) or not self._reader.is_alive(), timeout=limit_s
            )
        assert found and words in self.output, f"{words!r} was not printed:\n{self.output}"
        return self.output

    def end(self, signal_number: int | None = None, limit_s: float = 120.0) -> int:
        """Sends the signal, if any, waits for the end and returns the exit code."""
        if signal_number is not None:
            self.process.send_signal(signal_number)
        code = self.process.wait(limit_s)
        self._reader.join(limit_s)
        return code

    def family(self) -> list[psutil.Process]:
        """The processes that it started and that still live, however they are called and whoever their parent is."""
        return [each for each in psutil.process_iter() if self._belongs(each) and each.pid != self.process.pid]

    def folders(self) -> set[Path]:
        """Folders for sockets that the living processes use."""
        return {Path(path) for each in self.family() if (path := _environment(each).get(_RUNTIME))}

    def kill(self) -> None:
        """Ends whatever is left; for clean-up after a failed test."""
        for each in (
            [*self.family(), psutil.Process(self.process.pid)] if self.process.poll() is None else self.family()
        ):
            each.kill()

    def _belongs(self, process: psutil.Process) -> bool:
        return _environment(process).get(_MARK) == self._mark

    def _read(self) -> None:
        assert self.process.stdout is not None
        while piece := self.process.stdout.read(1):
            with self._changed:
                self._lines.append(piece)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


def users_environment() -> dict[str, str]:
    """The environment of a user's shell: without what a cluster in this very process has put into ours."""
    own = {name: value for name, value in os.environ.items() if name != _RUNTIME and not name.startswith("RAY_")}
    return {**own, "COLUMNS": "200"}


def eventually(condition: Callable[[], bool], limit_s: float = 20.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return condition()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except (psutil.Error, OSError):
        return {}
