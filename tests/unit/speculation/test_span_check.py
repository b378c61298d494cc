"""The span of a loaded draft is measured, and one that looks further ahead than declared is refused."""

from dataclasses import replace

import pytest

from cluster.errors import ModelLoadError
from cluster.speculation.lookahead import SpeculationMethod, draft_kv_lookahead
from cluster.speculation.ngram import NgramDrafter
from cluster.speculation.span_check import check_span, measure_span
from tests.unit.speculation.drafting import KV_METHODS, new_drafter, target


@pytest.mark.parametrize("method", KV_METHODS)
def test_the_measured_span_is_the_declared_one(method: SpeculationMethod) -> None:
    drafter = new_drafter(method)
    assert drafter.kv_layout is not None
    assert measure_span(drafter, target()) == draft_kv_lookahead(method, len(drafter.kv_layout.layers))


def test_a_draft_that_looks_further_ahead_than_declared_is_refused() -> None:
    drafter = new_drafter(SpeculationMethod.EAGLE3)
    drafter.shape = replace(drafter.shape, span=0)
    with pytest.raises(ModelLoadError, match="depends on 1 tokens ahead, but eagle3 declares a span of 0"):
        check_span(drafter, target())


def test_a_drafter_without_kv_has_nothing_to_check() -> None:
    check_span(NgramDrafter(3, 1, 3), target())
