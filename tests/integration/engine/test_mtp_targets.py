"""Targets of the families that publish MTP layers, drafting with the layers in their own folder."""

import json
from pathlib import Path

import pytest
import torch

from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.errors import ModelLoadError
from cluster.speculation.lookahead import SpeculationMethod
from tests.unit.speculation.mtp_checkpoints import FAMILIES, VOCAB, build

PROMPTS = [tuple(ids) for ids in torch.randint(VOCAB, (3, 17), generator=torch.Generator().manual_seed(4)).tolist()]
SAMPLING = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
UNSERVED = ("mimo", "qwen3_5", "qwen3_next")
"""Families whose targets transformers lacks or the gate refuses: their layers draft for another target."""
METHODS = (SpeculationMethod.MTP, SpeculationMethod.MTP_EAGLE)


def engine_of(target: Path, method: SpeculationMethod, draft: Path | None = None) -> Engine:
    return Engine(EngineConfig(target, draft, method, kv_bytes=1 << 20, block_size=4, chunk=7, audit=True))


def answers(engine: Engine, name: str) -> list[tuple[int, ...]]:
    requests = [EngineRequest(f"{name}{i}", prompt, SAMPLING) for i, prompt in enumerate(PROMPTS)]
    return [event.token_ids for event in engine.generate(requests)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_drafts_with_its_own_layers(family: str, tmp_path: Path) -> None:
    """Cold and warm, in chunks, audited: the answers are those without drafts."""
    target, draft = build(family, tmp_path / "own").folder, None
    if family in UNSERVED:
        target, draft = build("mimo", tmp_path / "other").folder, target
        rename(target, FAMILIES["mimo"].architecture)
    plain = answers(engine_of(target, SpeculationMethod.NONE), "plain")
    assert len({token for answer in plain for token in answer}) > 5
    for method in METHODS:
        engine = engine_of(target, method, draft)
        assert answers(engine, "cold") == answers(engine, "warm") == plain
        assert engine.stats().drafted > 0


def rename(folder: Path, model_type: str) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": model_type}))


@pytest.mark.parametrize("method", METHODS)
def test_a_hybrid_target_is_refused_in_one_sentence(method: SpeculationMethod, tmp_path: Path) -> None:
    build("qwen3_next", tmp_path)
    with pytest.raises(ModelLoadError, match=r"Qwen3NextForCausalLM .*: use a decoder-only model with full") as raised:
        engine_of(tmp_path, method)
    assert "\n" not in str(raised.value)
