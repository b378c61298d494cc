"""Flags derived from the configuration."""

from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from cluster.cli.flags import Flags, speculative_flag, with_config_flags
from cluster.config import option_names
from cluster.errors import ConfigError


def run(*arguments: str) -> Flags:
    """What a command with configuration flags receives."""
    app, received = typer.Typer(), []

    @app.command()
    @with_config_flags
    def command(model: Annotated[Path | None, typer.Argument()] = None, *, flags: Flags) -> None:
        received.append(flags)

    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return received[0]


def test_nothing_given_sets_nothing() -> None:
    assert run() == {}


def test_flags_are_nested_as_in_the_file() -> None:
    given = run("--block-size", "32", "--workers", "2", "--log-level", "debug", "--config-file", "a.yaml")
    assert given == {
        "engine": {"block_size": "32"},
        "cluster": {"workers": "2"},
        "log_level": "debug",
        "config_file": "a.yaml",
    }


def test_switches_have_two_sides() -> None:
    assert run("--no-reuse", "--audit") == {"engine": {"reuse": False, "audit": True}}


def test_none_unsets_an_option() -> None:
    assert run("--chunk", "none") == {"engine": {"chunk": None}}


def test_the_names_that_vllm_users_know_work() -> None:
    given = run("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "99")
    assert given == {"engine": {"max_batch": "4", "token_budget": "64", "max_model_len": "99"}}


@pytest.mark.parametrize("text", ["{method", "[]", '"eagle3"', "3"])
def test_a_speculative_config_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--speculative-config is .* must be a JSON object"):
        speculative_flag(text)


def test_every_option_but_those_with_other_ways_is_a_flag() -> None:
    app = typer.Typer()

    @app.command()
    @with_config_flags
    def command(*, flags: Flags) -> None: ...

    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output
    names = [name.rpartition(".")[2].replace("_", "-") for name in option_names() if not name.startswith("speculative")]
    assert [name for name in names if f"--{name}" not in text] == ["model", "redis-url", "api-keys", "tenant-secret"]
