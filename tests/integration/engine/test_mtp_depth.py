"""MTP layers of other numbers than the tiny ones have: exact and audited while requests come, go and are preempted."""

from pathlib import Path

import pytest

from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.speculation.lookahead import SpeculationMethod
from tests.fixtures.mtp_training import new_mtp, save_mtp
from tests.fixtures.prompts import TINY_TARGET
from tests.integration.engine.support import eight_prompts, greedy, reference, requests
from tests.unit.speculation.drafting import target

MAX_TOKENS, BLOCK = 12, 4
SAMPLING = greedy(MAX_TOKENS, ignore_eos=True)
BYTES_OF_A_TARGETS_TOKEN = 2048


@pytest.fixture(scope="module", params=[1, 3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many layers, as they begin to be trained: they hand on what they get, and are right now and then."""
    folder = tmp_path_factory.mktemp(f"layers{request.param}")
    save_mtp(new_mtp(target().model, request.param), target().model, folder)
    return folder


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
@pytest.mark.parametrize("chunk", [1, 3, BLOCK + 1])
def test_answers_and_published_kv_are_right(folder: Path, chunk: int, tight: bool) -> None:
    layers = int(folder.name.removeprefix("layers")[0])
    prompts = [prompt[-length:] for prompt, length in zip(eight_prompts(), (1, 2, 3, 4, 5, 17, 30, 30), strict=True)]
    tokens = 80 if tight else 2000
    kv_bytes = tokens * (BYTES_OF_A_TARGETS_TOKEN + 512 * layers)
    engine = Engine(
        EngineConfig(
            TINY_TARGET, folder, SpeculationMethod.MTP, 4, block_size=BLOCK, chunk=chunk, kv_bytes=kv_bytes, audit=True
        )
    )
    assert engine.parts.drafter is not None and engine.parts.drafter.shape.span == layers
    for name in ("cold", "warm"):
        events = engine.generate(requests(prompts, SAMPLING, name))
        assert [event.token_ids for event in events] == [reference(prompt, MAX_TOKENS).tokens for prompt in prompts]
    stats = engine.stats()
    assert stats.drafted > 0
    assert (stats.preemptions > 0) == tight
