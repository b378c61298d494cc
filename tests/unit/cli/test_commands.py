"""The command as a user runs it: help, mistakes, exit codes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.cli.exit_codes import ExitCode, exit_code
from cluster.errors import (
    CapacityExceeded,
    ConfigError,
    Internal,
    InvalidRequest,
    ModelLoadError,
    ModelNotFound,
    TandemError,
    Unauthenticated,
    Unavailable,
)

ROOT = Path(__file__).parents[3]
COMMANDS = ["serve", "generate", "chat", "status", "explain", "demo", "bench", "draft"]


def tandem(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "cluster.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)


def test_help_lists_every_command_and_loads_no_heavy_library() -> None:
    script = (
        "import sys; sys.argv = ['tandem', '--help']\n"
        "from cluster.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert all(command in result.stdout for command in COMMANDS)
    assert result.stdout.rstrip().endswith("[]"), result.stdout[-200:]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["serve", "--block-size", "17"], ExitCode.CONFIG, "engine.block_size is 17, but must be a power of two"),
        (["serve", "--nonsense"], ExitCode.CONFIG, "No such option"),
        (["serve", "--speculative-config", "{"], ExitCode.CONFIG, "must be a JSON object"),
        (["serve", "/nowhere/at/all"], ExitCode.MODEL, "/nowhere/at/all"),
        (["status", "--endpoint", "127.0.0.1:1"], ExitCode.UNAVAILABLE, "can't be reached"),
        (["generate", "hello", "--endpoint", "127.0.0.1:1"], ExitCode.UNAVAILABLE, "can't be reached"),
        (["chat", "--endpoint", "127.0.0.1:1"], ExitCode.UNAVAILABLE, "can't be reached"),
    ],
)
def test_a_mistake_ends_in_one_sentence_and_its_code(arguments: list[str], code: ExitCode, words: str) -> None:
    result = tandem(*arguments)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), ExitCode.CONFIG),
        (InvalidRequest("f", 0, "above 0", "raise it"), ExitCode.CONFIG),
        (Unauthenticated("x"), ExitCode.CONFIG),
        (ModelLoadError("x"), ExitCode.MODEL),
        (ModelNotFound("m", ("n",)), ExitCode.MODEL),
        (Unavailable("x"), ExitCode.UNAVAILABLE),
        (CapacityExceeded("x"), ExitCode.UNAVAILABLE),
        (Internal("id"), ExitCode.FAILED),
    ],
)
def test_each_kind_of_error_has_its_code(error: TandemError, code: ExitCode) -> None:
    assert exit_code(error) == code


def test_help_is_fast() -> None:
    began = time.monotonic()
    assert tandem("--help").returncode == 0
    assert time.monotonic() - began < 10  # half a second on a quiet machine; importing torch and Ray takes far longer


def test_the_documented_exit_codes_are_those_in_the_code() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert all(f"| {code.value} |" in text for code in ExitCode)
