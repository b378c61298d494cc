"""How many tokens are drafted: more when drafts are right, fewer when the batch is full, and never a hole in the
draft's KV."""

import random

import pytest

from cluster.core.batch_plan import AdmissionLimits, DraftShape
from cluster.core.draft_costs import FixedCosts
from cluster.core.draft_length import MEMORY, Acceptance, AdaptiveDraftLength, FixedDraftLength
from cluster.core.handle import Coupling
from tests.unit.core.oracle import make_pair, start
from tests.unit.core.oracle_worker import OracleWorker, make_request, reference

LENGTHS = AdaptiveDraftLength(FixedCosts(draft=0.1, token=0.02), retry=8)


def after(drafted: int, accepted: int, steps: int = 40) -> Acceptance:
    acceptance = Acceptance()
    for _ in range(steps):
        acceptance.observe(drafted, accepted, MEMORY)
    return acceptance


def test_right_drafts_make_it_longer_and_wrong_ones_shorter() -> None:
    chosen = [LENGTHS.choose(after(4, accepted), 1, 5) for accepted in range(5)]
    assert chosen == sorted(chosen)
    assert (chosen[0], chosen[-1]) == (0, 5)


def test_a_full_batch_makes_it_shorter_down_to_nothing() -> None:
    acceptance = after(4, 2)
    chosen = [LENGTHS.choose(acceptance, running, 5) for running in (1, 4, 16, 64)]
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] > 0 == chosen[-1]


def test_the_chosen_length_is_the_best_of_all() -> None:
    for accepted in range(5):
        rate = after(4, accepted).rate
        rates = {
            length: sum(rate**i for i in range(length + 1)) / (1 + length * (0.1 + 0.02 * 3)) for length in range(6)
        }
        best = max(rates, key=lambda length: rates[length])
        assert rates[LENGTHS.choose(after(4, accepted), 3, 5)] == pytest.approx(rates[best])


def test_what_was_given_up_is_tried_again_now_and_then() -> None:
    acceptance = after(4, 0)
    chosen = []
    for _ in range(20):
        chosen.append(LENGTHS.choose(acceptance, 1, 4))
        acceptance.observe(chosen[-1], 0, MEMORY)
    assert chosen == [0] * 8 + [1] + [0] * 8 + [1] + [0] * 2


def test_drafts_that_are_right_again_bring_the_length_back() -> None:
    acceptance = after(4, 0)
    assert LENGTHS.choose(acceptance, 1, 4) == 0
    for _ in range(200):
        length = LENGTHS.choose(acceptance, 1, 4)
        acceptance.observe(length, length, MEMORY)
    assert LENGTHS.choose(acceptance, 1, 4) == 4


def test_drafts_behind_a_wrong_one_are_not_held_against_it() -> None:
    acceptance = after(4, 1, steps=200)
    assert acceptance.rate == pytest.approx(0.5, abs=0.01)


def test_fixed_is_fixed() -> None:
    assert FixedDraftLength().choose(after(4, 0), 64, 3) == 3


@pytest.mark.parametrize("coupling", [Coupling.JOINT, Coupling.INDEPENDENT])
def test_without_drafts_the_drafts_kv_is_kept_up_and_can_be_reused(coupling: Coupling) -> None:
    span = int(coupling is Coupling.JOINT)
    oracle = make_pair(span, coupling=coupling)
    limits = AdmissionLimits(max_batch=4, token_budget=64, chunk=5, max_queue=8, max_len=100)
    lengths = AdaptiveDraftLength(FixedCosts(draft=10.0))  # never worth it
    worker = OracleWorker(oracle, limits, DraftShape(coupling, span, 3), random.Random(0), lengths=lengths)
    worker.admission.submit(make_request("a", range(100, 110), 10))
    while worker.admission.has_work():
        assert not any(row.num_drafts for row in worker.step().rows)
    again = start(oracle, [*range(100, 110), *reference(range(100, 110), 10)])
    assert oracle.cache.probe(again.handle).draft >= 20 - 1 - span
