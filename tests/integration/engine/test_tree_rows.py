"""Every architecture scores each node of a tree as it scores the path to it alone: windows, caps, sinks and all."""

from pathlib import Path

import pytest
import torch

from cluster.core.drafts import Drafts
from cluster.engine.batch import PagedRow, ancestor_mask, pack
from cluster.engine.kv_tensors import KvTensors
from cluster.engine.model import LoadedModel, load_target
from cluster.engine.runner import PagedModel
from tests.integration.engine.test_architectures import SERVED, save
from tests.unit.core.test_drafts import spelled

KNOWN = [5, 9, 33, 7, 61, 2, 18, 44, 90, 12, 71, 8, 29]
TREE = Drafts((3, 4, 5, 3, 6, 7, 8, 9, 1, 2), (None, None, 0, 1, 0, 2, 5, 5, 6, 8))


def model_over(loaded: LoadedModel) -> PagedModel:
    return PagedModel(loaded, KvTensors(loaded.layout, 16, 4, loaded.device))


@pytest.mark.parametrize("kind", SERVED)
def test_a_tree_is_scored_path_by_path(kind: str, tmp_path: Path) -> None:
    loaded = load_target(save(kind, tmp_path, **SERVED[kind]))
    model, table, start = model_over(loaded), [9, 2, 11, 4, 7, 0, 5], len(KNOWN) - 1
    model.forward(pack([PagedRow(KNOWN[:-1], 0, table)], model.kv), torch.tensor([0]))
    visible = ancestor_mask((None, *(0 if parent is None else parent + 1 for parent in TREE.parents)))
    positions = [start, *(start + depth for depth in TREE.depths)]
    row = PagedRow([KNOWN[-1], *TREE.tokens], start, table, 0, positions, visible)
    scored = model.forward(pack([row], model.kv), torch.arange(len(TREE) + 1)).logits
    for node, path in enumerate(((), *spelled(TREE))):
        tokens = [*KNOWN, *path]
        alone = model_over(loaded)
        batch = pack([PagedRow(tokens, 0, table)], alone.kv)
        want = alone.forward(batch, torch.tensor([len(tokens) - 1])).logits[0]
        torch.testing.assert_close(scored[node], want, atol=2e-4, rtol=1e-3)
