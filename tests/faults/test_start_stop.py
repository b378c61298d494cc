"""A start that fails or is interrupted leaves nothing behind: no process, no socket, no file.

That a clean stop doesn't either is checked at the end of the session's cluster (tests/support/cluster.py).
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from actors.cluster import start_cluster
from cluster.config import load_config
from cluster.errors import ConfigError, ModelLoadError
from tests.fixtures.prompts import TINY_DRAFT, TINY_TARGET
from tests.support.cluster import LIMIT_S, directories_of, tiny_config

STAGE = "stage: "
DRIVER = f"""
import json, sys
from actors.cluster import start_cluster
from cluster.config import load_config
from cluster.errors import TandemError
try:
    config = load_config(json.loads(sys.argv[1]))
    with start_cluster(config, lambda stage: print("{STAGE}" + stage, flush=True)):
        sys.stdin.read()
except TandemError as error:
    print(type(error).__name__, error, file=sys.stderr)
    sys.exit(3)
"""


class Driver:
    """A process that starts a cluster of one worker and holds it until it is signalled or its input closes."""

    def __init__(self, **options: object) -> None:
        engine = {"kv_cache_bytes": "8MiB"}
        config = {"model": str(TINY_TARGET), "engine": engine, "cluster": {"port": 0}, "log_level": "error", **options}
        self._mark = f"driver-{os.getpid()}-{time.monotonic_ns()}"
        # Whatever the cluster starts inherits the environment, which finds it again.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TEST_MARK": self._mark}
        self.process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._lines: Iterator[str] = iter(self.process.stdout or ())

    def read_until(self, beginning: str) -> None:
        for line in self._lines:
            if line.startswith(beginning):
                return
        raise AssertionError(f"ended before {beginning!r}: {self.process.stderr and self.process.stderr.read()}")

    def wait_for_the_middle_of(self, stage: str) -> None:
        """Returns once the stage has begun and has started something."""
        self.read_until(STAGE + stage)
        before = len(self.started())
        deadline = time.monotonic() + LIMIT_S
        while len(self.started()) <= before:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def started(self) -> list[psutil.Process]:
        """What the driver started and is alive, directly or not."""
        return [process for process in psutil.process_iter() if self._is_marked(process)]

    def _is_marked(self, process: psutil.Process) -> bool:
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            return alive and process.pid != self.process.pid and process.environ().get("TEST_MARK") == self._mark
        except (psutil.Error, OSError):
            return False

    def end(self, how: Callable[[subprocess.Popen[str]], object], patience_s: float = 0.0) -> tuple[int, str]:
        """Exit status and what was said, after it has ended and left nothing, at most `patience_s` later."""
        directories = directories_of(self.started())
        how(self.process)
        _, said = self.process.communicate(timeout=LIMIT_S)
        assert directories
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline and (self.started() or any(path.exists() for path in directories)):
            time.sleep(0.1)
        assert self.started() == [], "processes are left"
        assert [path for path in directories if path.exists()] == [], "files are left"
        return self.process.returncode, said


@pytest.fixture
def drive() -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(**options: object) -> Driver:
        drivers.append(Driver(**options))
        return drivers[-1]

    yield start
    for driver in drivers:
        for process in driver.started():
            process.kill()
        driver.process.kill()
        driver.process.communicate()


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, which reaches every process of the terminal's group."""
    os.killpg(process.pid, signal.SIGINT)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["Starting Ray", "Loading the model"])
def test_ctrl_c_while_starting_leaves_nothing(drive: Callable[..., Driver], stage: str) -> None:
    driver = drive()
    driver.wait_for_the_middle_of(stage)
    status, said = driver.end(interrupt)
    assert status != 0
    assert "KeyboardInterrupt" in said


@pytest.mark.ray
@pytest.mark.slow
def test_what_was_started_follows_a_killed_parent(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.wait_for_the_middle_of("Starting Ray")
    driver.end(subprocess.Popen.kill, patience_s=LIMIT_S)


@pytest.mark.ray
@pytest.mark.slow
def test_what_a_worker_finds_wrong_with_the_draft_is_said_in_its_words(
    drive: Callable[..., Driver], tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(TINY_DRAFT, draft)
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    first = min(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    tokenizer["model"]["vocab"]["another"] = tokenizer["model"]["vocab"].pop(first)
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))
    driver = drive(speculative={"method": "draft_model", "model": str(draft)})
    driver.read_until(STAGE + "Loading the model")
    status, said = driver.end(lambda process: None)
    assert status == 3
    assert "ModelLoadError" in said and "Traceback" not in said


def test_a_missing_model_is_refused_before_anything_starts(tmp_path: Path) -> None:
    stages: list[str] = []
    with pytest.raises(ModelLoadError, match="nowhere"):
        start_cluster(load_config({"model": tmp_path / "nowhere"}), stages.append)
    assert stages == ["Checking the model"]


def test_a_folder_without_safetensors_is_refused_before_anything_starts(tmp_path: Path) -> None:
    shutil.copy(TINY_TARGET / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    stages: list[str] = []
    with pytest.raises(ModelLoadError, match="safetensors"):
        start_cluster(load_config({"model": tmp_path}), stages.append)
    assert stages == ["Checking the model"]


def test_a_taken_port_is_refused_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=str(port)):
            start_cluster(tiny_config(port=port))
