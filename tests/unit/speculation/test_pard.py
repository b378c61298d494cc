"""PARD: several guesses in one pass through mask tokens, on top of the KV of an ordinary causal model."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cluster.engine.config import EngineConfig
from cluster.engine.sampler import Sampler, SampleRow
from cluster.errors import ModelLoadError
from cluster.speculation.factory import load_drafter
from cluster.speculation.lookahead import SpeculationMethod
from tests.fixtures.prompts import TINY_DRAFT, TINY_PARD, TINY_TARGET
from tests.unit.speculation.drafting import (
    GREEDY,
    Sequenced,
    assert_slots_equal,
    new_drafter,
    pool_of,
    prompts,
    scattered_blocks,
    target,
)

MASK = 5
HOT = replace(GREEDY, temperature=1.5)
PENALISED = replace(GREEDY, presence_penalty=2.0, frequency_penalty=2.0)


def plain() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_PARD, dtype=torch.float32, local_files_only=True)


@pytest.mark.parametrize("params", [GREEDY, HOT, PENALISED], ids=["greedy", "hot", "penalised"])
def test_drafts_are_what_one_pass_of_transformers_guesses(params: Any) -> None:
    """Guess j is drawn from the row of mask j with the clocks of its own position, and counts the drafts before it."""
    drafter = new_drafter(SpeculationMethod.PARD, drafts=4)
    model = plain()
    for i, ids in enumerate(prompts(5, 20, 60)):
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, MASK, MASK, MASK]])).logits[0, -4:].float()
        expected: list[int] = []
        for j in range(4):
            row = SampleRow(params, 11, len(ids) + j, ids, (), expected)
            token = Sampler(2048).sample(logits[j : j + 1], [row]).tokens[0]
            assert token is not None
            expected.append(token)
        drafts = Sequenced(drafter, list(ids), scattered_blocks(i), params=params).propose(4)
        assert list(drafts) == expected


def test_how_many_are_drafted_changes_none_of_them() -> None:
    drafter = new_drafter(SpeculationMethod.PARD, drafts=4)
    tokens = list(prompts(1, 20, 60)[0])
    most = Sequenced(drafter, tokens, scattered_blocks(0)).propose(4)
    assert [Sequenced(drafter, tokens, scattered_blocks(1)).propose(k) for k in (1, 2, 3)] == [
        most[:1], most[:2], most[:3],
    ]  # fmt: skip


def test_kv_of_known_tokens_is_that_of_the_model_without_masks() -> None:
    drafter = new_drafter(SpeculationMethod.PARD)
    kv = pool_of(drafter)
    sequence = Sequenced(drafter, list(prompts(1, 20, 60)[0]), scattered_blocks(0))
    with torch.inference_mode():
        cache = plain()(torch.tensor([sequence.tokens]), use_cache=True).past_key_values
    sequence.propose()
    expected = [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]
    assert_slots_equal(kv, sequence.blocks, sequence.end, expected)


def edited(tmp_path: Path, source: Path = TINY_PARD, **changes: object) -> Path:
    folder = Path(shutil.copytree(source, tmp_path / "draft"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def load(folder: Path) -> Any:
    return load_drafter(EngineConfig(TINY_TARGET, folder, SpeculationMethod.PARD), target(), Sampler(2048))


@pytest.mark.parametrize("mask", [None, 2048, -1, "5", True])
def test_a_checkpoint_that_names_no_mask_token_is_refused(mask: object, tmp_path: Path) -> None:
    folder = edited(tmp_path, TINY_DRAFT, **({} if mask is None else {"pard_token": mask}))
    with pytest.raises(ModelLoadError, match=r"pard_token in .* must be a token id below 2048: use a PARD checkpoint"):
        load(folder)


def test_the_mask_may_be_a_token_that_the_target_lacks(tmp_path: Path) -> None:
    """And the draft's embedding may be padded further than the target's."""
    folder = Path(shutil.copytree(TINY_PARD, tmp_path / "draft"))
    model = plain()
    model.resize_token_embeddings(2064, mean_resizing=False)
    model.config.pard_token = 2050
    model.save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": 2048, "content": "<|guess|>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelLoadError, match="token 2048 is '<|guess|>' in the draft only".replace("|", r"\|")):
        load(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "pard_token": 2048}))
    assert load(folder).method is SpeculationMethod.PARD
