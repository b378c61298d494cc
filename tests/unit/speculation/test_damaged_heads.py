"""Whatever stands in a head's config.json: it loads, or is refused in one sentence that names the folder."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ModelLoadError
from tests.unit.speculation import eagle3_checkpoints, test_eagle_model
from tests.unit.speculation.eagle3_checkpoints import random_head

DAMAGE = (0, -1, 1 << 40, 1.5, float("nan"), "x", None, True, [], [1, 2], {}, {"a": 1})
NESTED = {
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "parallel_draft_step": 1,
    "use_aux_hidden_state": True,
    "use_last_layernorm": True,
}
FLAGS = {"bias": False, "fc_norm": False, "norm_before_fc": False, "norm_before_residual": False, "norm_output": False}
LAYER = {
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": None,
    "max_position_embeddings": 2048,
    "rope_scaling": None,
    "rope_theta": 500.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
EAGLE3 = eagle3_checkpoints.DOCUMENT | FLAGS | {"eagle_config": NESTED, "target_hidden_size": None}
EAGLE = test_eagle_model.DOCUMENT | {"head_dim": 8, "qkv_bias": False}


def damaged(document: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """`document` with each damage at `key`, and without it."""
    yield {name: value for name, value in document.items() if name != key}
    yield from (document | {key: value} for value in DAMAGE)


def check(folder: Path, documents: Iterator[dict[str, Any]], load: Callable[[Path], object]) -> None:
    for document in documents:
        (folder / "config.json").write_text(json.dumps(document))
        try:
            load(folder)
        except ModelLoadError as error:
            message = str(error)
            assert "\n" not in message and message.endswith(".") and str(folder) in message, document


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """transformers warns of each odd position parameter."""
    caplog.set_level(logging.ERROR, logger="transformers")


@pytest.mark.parametrize("key", EAGLE3)
def test_a_damaged_eagle3_document(key: str, tmp_path: Path) -> None:
    eagle3_checkpoints.write(random_head(), tmp_path)
    check(tmp_path, damaged(EAGLE3, key), lambda folder: eagle3_checkpoints.load(folder, 4))


def test_damaged_layers_of_an_eagle3_document(tmp_path: Path) -> None:
    eagle3_checkpoints.write(random_head(), tmp_path)
    plain = EAGLE3["transformer_layer_config"]
    assert isinstance(plain, dict)
    layer = plain | LAYER
    documents = (EAGLE3 | {"transformer_layer_config": bad} for key in layer for bad in damaged(layer, key))
    check(tmp_path, documents, lambda folder: eagle3_checkpoints.load(folder, 4))


@pytest.mark.parametrize("key", EAGLE)
def test_a_damaged_eagle_document(key: str, tmp_path: Path) -> None:
    test_eagle_model.write(tmp_path, test_eagle_model.tensors())
    check(tmp_path, damaged(EAGLE, key), test_eagle_model.load)
