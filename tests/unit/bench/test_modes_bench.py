"""`tandem bench modes`: which modes are measured, and figures that are what they are called."""

from pathlib import Path

import pytest

from cluster.bench.modes import Mode, ModeEffort, modes_of, run_modes_bench
from cluster.cli.bench_modes import drafts_by_mode, tiny_models
from cluster.errors import ConfigError
from cluster.speculation.lookahead import DraftFolder, SpeculationMethod, draft_folder
from tests.fixtures.prompts import MODELS, TINY_DRAFTS, TINY_EAGLE3, TINY_TARGET

EAGLE3 = SpeculationMethod.EAGLE3


def test_a_mode_whose_draft_is_not_named_is_left_out_with_a_sentence() -> None:
    told: list[str] = []
    modes = modes_of({EAGLE3: TINY_EAGLE3}, told.append)
    assert [mode.name for mode in modes] == ["ngram", "suffix", "eagle3", "eagle3_tree"]
    without = [method for method in SpeculationMethod if draft_folder(method) is not DraftFolder.NEVER]
    assert len(told) == len(without) - 1
    assert "medusa is left out: no draft is named for it (--draft medusa=DIR)" in told


def test_in_a_checkout_every_mode_has_its_tiny_draft() -> None:
    target, drafts = tiny_models(MODELS)
    assert target == TINY_TARGET
    assert {str(method): folder for method, folder in drafts.items()} == TINY_DRAFTS


def test_folders_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    assert drafts_by_mode(["eagle3=/a/b=c", "medusa=d"]) == {EAGLE3: Path("/a/b=c"), "medusa": Path("d")}
    for entry in ("eagle3", "eagle3=", "ngram=x", "eagle4=x"):
        with pytest.raises(ConfigError, match="must be MODE=DIR with one of"):
            drafts_by_mode([entry])
    with pytest.raises(ConfigError, match="name a target and its drafts"):
        tiny_models(tmp_path / "nowhere")


def test_figures_of_a_chain_a_tree_and_a_mode_without_a_pool() -> None:
    modes = [Mode(SpeculationMethod.NGRAM), Mode(EAGLE3, TINY_EAGLE3), Mode(EAGLE3, TINY_EAGLE3, tree=True)]
    effort = ModeEffort(rounds=1, prompts=3, new_tokens=12, threads=1)
    figures = run_modes_bench(TINY_TARGET, modes, effort, lambda what: None)
    assert list(figures) == ["none", "ngram", "eagle3", "eagle3_tree"]
    assert (figures["none"].acceptance, figures["none"].vs_none) == (1.0, 1.0)
    assert 1 < figures["eagle3"].acceptance < figures["eagle3_tree"].acceptance <= 4
    assert figures["ngram"].draft_bytes_per_token == 0 < figures["eagle3"].draft_bytes_per_token
    assert all(0.97 < found.reuse <= 1 for found in figures.values())
    assert all(found.vs_none > 0 for found in figures.values())
    assert figures["eagle3"].keys("eagle3").keys() == {
        f"modes.eagle3.{name}" for name in ("acceptance", "vs_none", "draft_bytes_per_token", "reuse")
    }
