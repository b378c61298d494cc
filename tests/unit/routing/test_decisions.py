"""Decisions explain themselves, also when the state they were made in is gone."""

import random
from dataclasses import replace

import pytest

from cluster.routing.decisions import Decisions
from cluster.routing.policy import CostModel
from cluster.routing.router import Router, RouterLimits
from cluster.routing.types import Placement, Refusal, WorkerLoad
from tests.unit.routing.builders import BLOCK, chain, query, report, states, worker

PROMPT = chain(*range(10))


@pytest.fixture
def router() -> Router:
    """Three live workers of model m: a holds most of the prompt, b some, c is full."""
    made = Router(RouterLimits(), CostModel(), random.Random(0))
    for name, target in (("a", 8), ("b", 3), ("c", 0)):
        made.register(worker(name), 0, now=0.0)
        made.heartbeat(name, 1, WorkerLoad(running=8 if name == "c" else 0), now=0.0)
        made.apply(report(name, stored=states(PROMPT, target, target)))
    return made


def test_candidates_have_depths_and_cost_terms_and_the_cheapest_was_chosen(router: Router) -> None:
    placed = router.dispatch(query(PROMPT, "r-1"), now=1.0)
    assert isinstance(placed, Placement)
    (told,) = router.explain("r-1", "", now=3.0)
    assert (told.chosen, told.age_s, told.prompt_tokens) == ("a", 2.0, 10 * BLOCK + 1)
    assert [(each.worker_id, each.target_tokens, each.draft_tokens) for each in told.candidates] == [
        ("a", 8 * BLOCK, 8 * BLOCK),
        ("b", 3 * BLOCK, 3 * BLOCK),
    ]
    prefill = [each.cost_ms["target_prefill"] for each in told.candidates]
    assert prefill == [2 * BLOCK + 1, 7 * BLOCK + 1], "the default model takes a millisecond a token"
    assert told.passed_over == {"c": "full"}


def test_each_attempt_is_found_by_the_clients_id_and_only_by_its_tenant(router: Router) -> None:
    for attempt in ("chat-7-aa", "chat-7-bb", "chat-8-cc"):
        router.dispatch(replace(query(PROMPT, attempt), tenant="t"), now=1.0)
    assert [told.request_id for told in router.explain("chat-7", "t", now=1.0)] == ["chat-7-aa", "chat-7-bb"]
    assert router.explain("chat-7", "other", now=1.0) == ()
    assert router.explain("never", "t", now=1.0) == ()


def test_reasons_of_those_that_may_not_take_it(router: Router) -> None:
    router.register(worker("d"), 0, now=0.0)
    router.suspect("d", 1)
    router.dispatch(query(PROMPT, "r", exclude=frozenset({"a"})), now=1.0)
    (told,) = router.explain("r", "", now=1.0)
    assert told.chosen == "b"
    assert told.passed_over == {"a": "just failed this request", "c": "full", "d": "is suspect"}


def test_a_named_worker_takes_the_request_or_nobody_does(router: Router) -> None:
    placed = router.dispatch(replace(query(PROMPT, "r"), worker_id="b"), now=1.0)
    assert isinstance(placed, Placement)
    assert placed.worker_id == "b"
    refused = router.dispatch(replace(query(PROMPT, "s"), worker_id="nobody"), now=1.0)
    assert isinstance(refused, Refusal)
    assert "worker_id is nobody" in refused.reason
    (told,) = router.explain("s", "", now=1.0)
    assert told.chosen is None
    assert told.passed_over == dict.fromkeys("abc", "the request names nobody")


def test_the_oldest_are_forgotten_and_no_prompt_is_kept(router: Router) -> None:
    router._decisions = Decisions(limit=3)
    for number in range(5):
        router.dispatch(query(PROMPT, f"r{number}"), now=1.0)
    assert router.explain("r1", "", now=1.0) == ()
    (kept,) = router._decisions.find("r4", "")
    assert kept.query.keys == ()
