"""Adaptive draft lengths: other speeds, the same tokens, and no hole in the draft's KV."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.fixtures.prompts import TINY_EAGLE3
from tests.integration.engine.support import eight_prompts, greedy, make_engine, requests, run_all


@pytest.fixture
def wrong_head(tmp_path: Path) -> Path:
    """A head that drafts what the tiny one finds least likely."""
    folder = Path(shutil.copytree(TINY_EAGLE3, tmp_path / "wrong"))
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = -tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "ngram"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lengths_change_no_token(method: str, temperature: float) -> None:
    sampling = replace(greedy(40, ignore_eos=True), temperature=temperature, seed=3)
    expected = [event.token_ids for event in run_all(make_engine("none"), eight_prompts(), sampling)]
    engine = make_engine(method, adaptive_length=True, audit=True)
    assert [event.token_ids for event in run_all(engine, eight_prompts(), sampling)] == expected
    assert all(result.ok for result in engine.audit())


def test_drafts_that_are_hardly_ever_right_are_given_up_but_the_drafts_kv_is_kept_up(wrong_head: Path) -> None:
    engine = make_engine("eagle3", adaptive_length=True, draft=wrong_head, audit=True)
    prompt = eight_prompts()[0]
    first = run_all(engine, [prompt], greedy(160, ignore_eos=True))[0]
    assert first.usage is not None and first.usage.accepted <= 3
    assert 0 < first.usage.drafted < 100, "of 3 in each of 160 steps"
    assert all(result.ok for result in engine.audit())
    # Had the draft's KV a hole where nothing was drafted, a follow-up could not reuse the answer in both pools.
    follow_up = engine.generate(requests([(*prompt, *first.token_ids)], greedy(4), name="again"))[0]
    assert follow_up.usage is not None
    assert follow_up.usage.reused_joint == len(prompt) + 160 - 1
