"""A model whose layers all slide keeps no more KV than its windows see, and says the same as with all of it."""

import random
from functools import cache
from pathlib import Path

import pytest
import torch

from cluster.core.sampling import SamplingParams
from cluster.engine.config import EngineConfig
from cluster.engine.engine import Engine
from cluster.engine.events import EngineRequest
from cluster.engine.model import load_target
from cluster.speculation.lookahead import SpeculationMethod
from tests.integration.engine.test_architectures import save

WINDOW = 20
BLOCK = 4
TOKENS = 60
BYTES_PER_TOKEN = 3 * 2 * 2 * 8 * 4


@pytest.fixture(scope="module")
def sliding(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three random layers, each with a window of 20 tokens."""
    return save("mistral", tmp_path_factory.mktemp("sliding"), sliding_window=WINDOW)


def engine(folder: Path, method: str, blocks: int, **options: object) -> Engine:
    """`blocks` of each pool; the draft is the target itself, so that all drafts are accepted."""
    torch.set_num_threads(1)
    pools = 2 if method == "draft_model" else 1
    return Engine(
        EngineConfig(
            model=folder,
            draft=folder if method == "draft_model" else None,
            method=SpeculationMethod(method),
            block_size=BLOCK,
            kv_bytes=pools * (blocks + 1) * BLOCK * BYTES_PER_TOKEN,
            audit=True,
            chunk=16,
            token_budget=16,
            max_batch=4,
            **options,  # type: ignore[arg-type]
        )
    )


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 97) for _ in range(50)]
    return tuple((*shared[: rng.randrange(20, 50)], *(rng.randrange(3, 97) for _ in range(20))) for _ in range(5))


def answers(served: Engine, asked: tuple[tuple[int, ...], ...], name: str = "r") -> list[tuple[int, ...]]:
    sampling = SamplingParams(TOKENS, temperature=0, ignore_eos=True)
    events = served.generate([EngineRequest(f"{name}{i}", prompt, sampling) for i, prompt in enumerate(asked)])
    return [tuple(event.token_ids) for event in events]


def test_windows_are_found_by_running_the_model(sliding: Path, tmp_path: Path) -> None:
    assert load_target(sliding).layout.window == WINDOW
    assert load_target(save("llama", tmp_path / "full")).layout.window is None
    assert load_target(save("gemma2", tmp_path / "some", head_dim=8, sliding_window=8)).layout.window is None


@pytest.mark.parametrize("method", ["none", "ngram", "draft_model"])
@pytest.mark.parametrize("blocks", [24, 40, 400])
def test_answers_are_those_of_a_pool_that_keeps_everything(sliding: Path, method: str, blocks: int) -> None:
    expected = answers(engine(sliding, "none", 400, enable_reuse=False), prompts())
    served = engine(sliding, method, blocks)
    assert answers(served, prompts()) == expected
    follow_ups = tuple((*prompt, *answer, 5) for prompt, answer in zip(prompts(), expected, strict=True))
    continued = answers(engine(sliding, "none", 400, enable_reuse=False), follow_ups)
    assert answers(served, follow_ups, "follow-up") == continued
    assert all(result.ok for result in served.audit())


@pytest.mark.parametrize("reuse", [True, False])
def test_a_request_longer_than_the_pool_is_served(sliding: Path, reuse: bool) -> None:
    prompt = tuple(random.Random(5).randrange(3, 97) for _ in range(110))
    (expected,) = answers(engine(sliding, "none", 400), (prompt,))
    served = engine(sliding, "none", 24, enable_reuse=reuse)
    assert len(prompt) + TOKENS > 24 * BLOCK
    assert answers(served, (prompt,)) == [expected]


def test_what_lies_behind_the_window_makes_room_for_others(sliding: Path) -> None:
    served = engine(sliding, "none", 400)
    sampling = SamplingParams(120, temperature=0, ignore_eos=True)
    served.add(EngineRequest("long", prompts()[0], sampling))
    most = 0
    while served.has_work():
        served.step()
        most = max(most, served.stats().pools["target"].in_use)
    assert most <= (2 * WINDOW + BLOCK + 16) // BLOCK + 1, "not the 45 blocks of 180 tokens"
