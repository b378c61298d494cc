"""The span table decides who may reuse draft KV; every method has its row."""

import pytest

from cluster.core.paired_cache import Coupling
from cluster.speculation.lookahead import (
    SpeculationMethod,
    coupling_of,
    draft_kv_lookahead,
    has_draft_kv,
    joint_reuse_eligible,
)

EXPECTED = {
    "none": (None, Coupling.NONE),
    "ngram": (None, Coupling.NONE),
    "suffix": (None, Coupling.NONE),
    "draft_model": (0, Coupling.INDEPENDENT),
    "pard": (0, Coupling.INDEPENDENT),
    "dflash": (0, Coupling.JOINT),
    "eagle": (1, Coupling.JOINT),
    "eagle3": (1, Coupling.JOINT),
    "peagle": (1, Coupling.JOINT),
    "mtp_eagle": (1, Coupling.JOINT),
    "mtp": (None, Coupling.JOINT),  # not established before the number of layers is
    "medusa": (None, Coupling.NONE),
}


@pytest.mark.parametrize("method", SpeculationMethod)
def test_every_method_states_its_span_and_coupling(method: SpeculationMethod) -> None:
    assert (draft_kv_lookahead(method), coupling_of(method)) == EXPECTED[method.value]


@pytest.mark.parametrize("method", SpeculationMethod)
def test_joint_reuse_needs_a_known_span_and_two_pools(method: SpeculationMethod) -> None:
    two_pools = coupling_of(method) is not Coupling.NONE
    assert two_pools == has_draft_kv(method)
    assert joint_reuse_eligible(method) == (two_pools and draft_kv_lookahead(method) is not None)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_that_look_ahead_one_after_the_other_add_up(layers: int) -> None:
    assert draft_kv_lookahead(SpeculationMethod.MTP, layers) == layers
    assert joint_reuse_eligible(SpeculationMethod.MTP, layers)
    assert draft_kv_lookahead(SpeculationMethod.EAGLE3, layers) == 1
