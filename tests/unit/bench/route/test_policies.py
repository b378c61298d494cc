"""Each router's choice in situations whose answer follows from its published description."""

import random
from collections import Counter

import pytest

from cluster.bench.route.approximate import CacheAware, PrefixAffinity
from cluster.bench.route.balancing import ConsistentHash, LeastLoaded, PowerOfTwo, RoundRobin
from cluster.bench.route.informed import DynamoCost, LlmdScorer
from cluster.bench.route.policy import News, Policy
from cluster.bench.route.product import TandemRouter
from tests.unit.bench.route.builders import BLOCK, SPEC, request

PROMPT = tuple(range(20))


def rng() -> random.Random:
    return random.Random(5)


def news(
    blocks: list[tuple[int, bool, bool]], waiting: int = 0, running: int = 0, in_use: int = 0, prefill: int = 0
) -> News:
    return News(running, waiting, prefill, (), blocks, (in_use, in_use), (100 - in_use, 100 - in_use), 100)


def holding(prompt: tuple[int, ...], draft: bool = True) -> News:
    return news([(block, True, draft) for block in prompt])


def place(policy: Policy, number: int = 0, prompt: tuple[int, ...] = PROMPT, **options: object) -> int:
    return policy.place(request(number, prompt, **options), 0.0)  # type: ignore[arg-type]


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin(3, rng())
    first = [place(policy) for _ in range(3)]
    assert sorted(first) == [0, 1, 2]
    assert [place(policy) for _ in range(3)] == first


def test_least_loaded_fills_evenly_and_hears_of_ends() -> None:
    policy = LeastLoaded(4, rng())
    assert Counter(place(policy) for _ in range(8)) == {0: 2, 1: 2, 2: 2, 3: 2}
    policy.ended(2, request(), 0.0)
    assert place(policy) == 2


def test_power_of_two_avoids_the_busiest_but_not_more() -> None:
    policy = PowerOfTwo(3, rng())
    policy.load = [10, 0, 5]
    placed = Counter(place(policy) for _ in range(4))
    assert placed[0] == 0
    assert placed[2] > 0, "two are drawn at random: the emptiest isn't always among them"


def test_consistent_hashing_keeps_a_session_and_moves_few_when_a_worker_joins() -> None:
    four, five = ConsistentHash(4, rng()), ConsistentHash(5, rng())
    before = {session: place(four, session=session) for session in range(2000)}
    assert before == {session: place(four, session=session) for session in range(2000)}
    moved = [session for session, worker in before.items() if place(five, session=session) != worker]
    assert all(place(five, session=session) == 4 for session in moved)
    assert 200 < len(moved) < 600


def test_cache_aware_follows_a_match_above_three_tenths_and_else_goes_where_least_was_sent() -> None:
    policy = CacheAware(3, rng())
    home = place(policy)
    assert place(policy, prompt=(*PROMPT[:7], *range(100, 113))) == home, "7 of 20 blocks match"
    assert place(policy, prompt=(*PROMPT[:6], *range(200, 214))) != home, "6 of 20 don't suffice"


def test_cache_aware_balances_beyond_64_requests_and_half_as_many_again() -> None:
    policy = CacheAware(2, rng())
    home = place(policy)
    policy.load[home] = 64
    assert place(policy) == home, "64 more is not more than 64"
    assert place(policy) != home


def test_prefix_affinity_picks_the_emptier_of_the_holders_whatever_others_are_doing() -> None:
    policy = PrefixAffinity(3, rng())
    home = place(policy)
    policy.load[home] = 1000
    assert place(policy, prompt=PROMPT[:2]) == home, "its imbalance threshold is infinite"
    assert place(policy, prompt=(0, *range(300, 319))) != home, "1 of 20 blocks is less than a tenth"


def test_dynamo_adds_blocks_to_prefill_and_blocks_that_are_active() -> None:
    policy = DynamoCost(2, rng(), BLOCK)
    policy.news(0, holding(PROMPT), 0.0)
    assert place(policy, 1) == 0, "half a block to prefill against 20.5; 20 active on either"
    assert place(policy, 2) == 0, "the same blocks are active already: 0 more against 20"
    other = tuple(range(100, 120))
    assert place(policy, 3, other) == 1, "20.5 to prefill on either, 20 active on the first"
    policy.ended(0, request(1, PROMPT), 1.0)
    policy.first_token(0, request(1, PROMPT), 1.0)
    assert place(policy, 4, tuple(range(200, 205))) == 0, "0.5 waits and 20 are active, against 20.5 and 20"


def test_llm_d_weighs_prefix_queue_and_memory() -> None:
    policy = LlmdScorer(2, rng())
    policy.news(0, holding(PROMPT[:10]), 0.0)
    assert place(policy, 1, (*PROMPT[:10], *range(50, 60))) == 0, "1.5 for half the prompt"
    policy = LlmdScorer(2, rng())
    policy.news(0, news([(block, True, True) for block in PROMPT[:10]], waiting=3), 0.0)
    assert place(policy, 2, (*PROMPT[:10], *range(50, 60))) == 1, "2 for the shorter queue"


def test_llm_d_counts_what_it_just_sent_for_two_seconds() -> None:
    policy = LlmdScorer(8, rng())
    home = policy.place(request(0, PROMPT), 0.0)
    assert all(policy.place(request(number, PROMPT), 1.9) == home for number in range(1, 6))
    assert len({policy.place(request(number, range(number * 100, number * 100 + 9)), 4.0) for number in range(9)}) > 1


@pytest.mark.parametrize("draft_aware", [True, False])
def test_only_a_draft_aware_router_tells_joint_holders_from_target_holders(draft_aware: bool) -> None:
    policy = TandemRouter(8, rng(), SPEC, BLOCK, draft_aware)
    policy.news(3, holding(PROMPT, draft=False), 0.0)
    policy.news(6, holding(PROMPT[:15]), 0.0)
    assert place(policy, 1) == (6 if draft_aware else 3)
    assert place(policy, 2, speculative=False) == 3, "a plain request needs the target pool only"
