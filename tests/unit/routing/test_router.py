"""Placing requests: prefixes, load, death, and what a refusal says."""

import random
from dataclasses import replace

import pytest

from cluster.errors import ConfigError, StaleEpoch
from cluster.routing.policy import CostModel
from cluster.routing.prefix_map import Depth
from cluster.routing.router import Router, RouterLimits
from cluster.routing.types import Placement, Refusal, WorkerLoad
from tests.unit.routing.builders import CARD, chain, query, report, states, worker

PROMPT = chain(*range(8))


def router(*names: str, seed: int = 0, **worker_options: int) -> Router:
    made = Router(RouterLimits(lease_s=3.0, reservation_s=2.0), CostModel(), random.Random(seed))
    for name in names:
        made.register(worker(name, **worker_options), 0, now=0.0)
    return made


def place(scheduler: Router, request_id: str = "r", now: float = 0.0, keys: tuple[bytes, ...] = PROMPT) -> Placement:
    answer = scheduler.dispatch(query(keys, request_id), now)
    assert isinstance(answer, Placement), answer
    return answer


def test_a_request_goes_to_the_holder_of_its_prefix() -> None:
    for seed in range(5):
        scheduler = router("a", "b", "c", seed=seed)
        scheduler.apply(report("b", stored=states(PROMPT, 8, 6)))
        placement = place(scheduler)
        assert (placement.worker_id, placement.epoch) == ("b", 1)
        assert (placement.expected.target, placement.expected.draft, placement.expected.joint) == (128, 96, 96)


def test_when_the_holder_is_saturated_requests_go_elsewhere() -> None:
    scheduler = router("a", "b", max_running=2, max_queue=2)
    scheduler.apply(report("a", stored=states(PROMPT, 8, 8)))
    placed = [place(scheduler, f"r{index}").worker_id for index in range(8)]
    assert placed[0] == "a"
    assert placed.count("a") == placed.count("b") == 4
    refusal = scheduler.dispatch(query(PROMPT, "one too many"), now=0.0)
    assert isinstance(refusal, Refusal)
    assert refusal.saturated
    assert refusal.retry_after_s > 0


def test_a_burst_does_not_herd() -> None:
    scheduler = router("a", "b", "c", "d", max_running=8, max_queue=0)
    placed = [place(scheduler, f"r{index}", keys=chain(f"cold {index}")).worker_id for index in range(32)]
    assert {placed.count(name) for name in "abcd"} == {8}


def test_a_reservation_ends_with_the_heartbeat_that_names_it_or_with_time() -> None:
    scheduler = router("a", max_running=1, max_queue=0)
    place(scheduler, "r1")
    assert isinstance(scheduler.dispatch(query(PROMPT, "r2"), now=0.5), Refusal)
    scheduler.heartbeat("a", 1, WorkerLoad(running=1, started=("r1",)), now=0.5)
    assert scheduler.status(0.5)[0].reserved == 0
    assert isinstance(scheduler.dispatch(query(PROMPT, "r2"), now=0.6), Refusal), "it runs, so the place is taken"
    scheduler.heartbeat("a", 1, WorkerLoad(running=0), now=0.7)
    place(scheduler, "never arrives", now=0.8)
    assert isinstance(scheduler.dispatch(query(PROMPT, "r3"), now=1.0), Refusal)
    scheduler.heartbeat("a", 1, WorkerLoad(running=0), now=2.5)
    place(scheduler, "r3", now=2.9)


def test_a_worker_without_heartbeats_is_masked_when_its_lease_ends_whatever_the_map_says() -> None:
    scheduler = router("a", "b")
    scheduler.apply(report("a", stored=states(PROMPT, 8, 8)))
    scheduler.heartbeat("b", 1, WorkerLoad(), now=2.9)
    assert place(scheduler, now=3.1).worker_id == "b"
    assert [info.worker_id for info in scheduler.expire(3.1)] == ["a"]
    assert scheduler.map.depths(PROMPT) == {}
    assert not scheduler.heartbeat("a", 1, WorkerLoad(), now=3.2).registered, "it is told to register again"


def test_a_lost_worker_is_masked_at_once_and_its_next_life_starts_cold() -> None:
    scheduler = router("a", "b")
    scheduler.apply(report("a", stored=states(PROMPT, 8, 8)))
    assert scheduler.lose("a", 1)
    assert place(scheduler).worker_id == "b"
    scheduler.register(worker("a", epoch=2), 0, now=0.1)
    assert not scheduler.lose("a", 1), "news of the old life says nothing of the new one"
    assert place(scheduler, "r2", keys=chain("x")).expected.joint == 0
    assert scheduler.map.depths(PROMPT) == {}


def test_a_suspect_is_avoided_until_it_is_heard_of_again() -> None:
    scheduler = router("a", "b")
    scheduler.apply(report("a", stored=states(PROMPT, 8, 8)))
    scheduler.suspect("a", 1)
    assert place(scheduler).worker_id == "b"
    for now in (0.1, 0.2):
        scheduler.heartbeat("a", 1, WorkerLoad(), now)
    assert place(scheduler, now=0.3).worker_id == "a"


def test_workers_that_failed_the_request_are_excluded() -> None:
    scheduler = router("a", "b")
    scheduler.apply(report("a", stored=states(PROMPT, 8, 8)))
    answer = scheduler.dispatch(query(PROMPT, exclude=frozenset({"a"})), now=0.0)
    assert isinstance(answer, Placement) and answer.worker_id == "b"


def test_with_no_worker_alive_the_client_hears_so() -> None:
    refusal = router().dispatch(query(PROMPT), now=0.0)
    assert isinstance(refusal, Refusal)
    assert not refusal.saturated
    assert "m" in refusal.reason


@pytest.mark.parametrize("field", ["fingerprint", "kv_dtype", "block_size", "hash_scheme"])
def test_workers_whose_keys_differ_are_refused_loudly(field: str) -> None:
    scheduler = router("a")
    other = replace(CARD, **{field: 32 if field == "block_size" else "other"})
    with pytest.raises(ConfigError, match=field):
        scheduler.register(worker("b", card=other), 0, now=0.0)
    scheduler.register(worker("b", card=replace(other, name="another model")), 0, now=0.0)


def test_an_earlier_life_can_not_take_over() -> None:
    scheduler = router("a", epoch=5)
    with pytest.raises(StaleEpoch):
        scheduler.register(worker("a", epoch=4), 0, now=0.0)


def test_hints_count_only_for_workers_whose_picture_has_gaps() -> None:
    scheduler = router("a", "b")
    hints = {("a", 1): Depth(8, 8), ("b", 7): Depth(8, 8)}
    assert not scheduler.incomplete("m")
    assert isinstance(answer := scheduler.dispatch(query(PROMPT), 0.0, hints), Placement)
    assert answer.expected.joint == 0
    scheduler.heartbeat("a", 1, WorkerLoad(last_seq=9), now=0.0)
    assert scheduler.incomplete("m")
    assert isinstance(answer := scheduler.dispatch(query(PROMPT, "r2"), 0.0, hints), Placement)
    assert (answer.worker_id, answer.expected.joint) == ("a", 128)
