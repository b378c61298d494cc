"""Numbered reports: whatever the network does to them, the map ends up as the worker is."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.core.frontier import FrontierReport
from cluster.routing.policy import CostModel
from cluster.routing.report_order import Verdict
from cluster.routing.router import Router, RouterLimits
from cluster.routing.types import WorkerLoad
from tests.unit.routing.builders import chain, report, states, worker

PATHS = [chain(*path) for path in ((0, 0, 0), (0, 1, 1), (1, 0), (2, 2, 2, 2))]


def router() -> Router:
    return Router(RouterLimits(), CostModel(), random.Random(0))


def test_a_gap_asks_for_a_snapshot_and_the_snapshot_heals_it() -> None:
    scheduler = router()
    scheduler.register(worker(), 0, now=0.0)
    assert scheduler.apply(report(seq=1, stored=states(PATHS[0]))) is Verdict.APPLY
    assert scheduler.apply(report(seq=3, stored=states(PATHS[2]))) is Verdict.GAP
    assert scheduler.apply(report(seq=4, removed=PATHS[0][2:])) is Verdict.GAP
    assert scheduler.map.blocks_of("a") == 3, "nothing is applied out of order"
    assert scheduler.heartbeat("a", 1, WorkerLoad(last_seq=4), now=0.1).want_snapshot
    assert scheduler.apply(report(seq=5, stored=states(PATHS[3]), snapshot=True)) is Verdict.APPLY
    assert scheduler.map.depths(PATHS[0]) == {}, "a snapshot replaces everything"
    assert scheduler.map.blocks_of("a") == 4
    assert not scheduler.heartbeat("a", 1, WorkerLoad(last_seq=5), now=0.2).want_snapshot


def test_a_lost_last_report_is_found_out_by_the_heartbeat() -> None:
    scheduler = router()
    scheduler.register(worker(), 0, now=0.0)
    assert scheduler.heartbeat("a", 1, WorkerLoad(last_seq=1), now=0.1).want_snapshot


def test_a_report_applied_twice_changes_nothing() -> None:
    scheduler = router()
    scheduler.register(worker(), 0, now=0.0)
    first = report(seq=1, stored=states(PATHS[0]))
    scheduler.apply(first)
    scheduler.apply(report(seq=2, removed=PATHS[0]))
    assert scheduler.apply(first) is Verdict.DUPLICATE
    assert scheduler.map.depths(PATHS[0]) == {}


def test_reports_of_an_earlier_life_are_ignored() -> None:
    scheduler = router()
    scheduler.register(worker(epoch=1), 0, now=0.0)
    scheduler.apply(report(epoch=1, seq=1, stored=states(PATHS[0])))
    scheduler.register(worker(epoch=2), 0, now=1.0)
    assert scheduler.map.depths(PATHS[0]) == {}, "a restarted worker holds nothing"
    assert scheduler.apply(report(epoch=1, seq=2, stored=states(PATHS[0]))) is Verdict.STALE
    assert not scheduler.heartbeat("a", 1, WorkerLoad(), now=1.0).registered
    assert scheduler.map.depths(PATHS[0]) == {}


class Network:
    """Holds messages back, loses, repeats and reorders them as told."""

    def __init__(self, choices: st.DataObject) -> None:
        self._choices = choices
        self.under_way: list[FrontierReport] = []

    def send(self, message: FrontierReport) -> None:
        self.under_way += [message] * self._choices.draw(st.sampled_from([1, 1, 1, 0, 2]))

    def arrivals(self) -> list[FrontierReport]:
        order = self._choices.draw(st.permutations(self.under_way))
        count = self._choices.draw(st.integers(0, len(order)))
        self.under_way = order[count:]
        return order[:count]


@given(
    st.data(),
    st.lists(st.tuples(st.sampled_from(PATHS), st.integers(0, 4), st.integers(0, 4), st.booleans()), max_size=25),
)
def test_lost_repeated_and_reordered_reports_converge(
    data: st.DataObject, changes: list[tuple[tuple[bytes, ...], int, int, bool]]
) -> None:
    scheduler, network = router(), Network(data)
    scheduler.register(worker(), 0, now=0.0)
    truth: dict[bytes, tuple[bool, bool]] = {}
    blocks: dict[bytes, object] = {}
    seq, want_snapshot = 0, False

    def snapshot() -> FrontierReport:
        return report(seq=seq, stored=tuple(blocks[key] for key in truth), snapshot=True)  # type: ignore[misc]

    for path, target, draft, remove in changes:
        seq += 1
        if want_snapshot:
            network.send(snapshot())
            want_snapshot = False
            continue
        if remove:
            gone = [key for key in path if truth.pop(key, None)]
            network.send(report(seq=seq, removed=gone))
        else:
            new = states(path, target, draft)
            truth.update({state.key: (state.target, state.draft) for state in new})
            blocks.update({state.key: state for state in new})
            network.send(report(seq=seq, stored=new))
        for message in network.arrivals():
            want_snapshot |= scheduler.apply(message) is Verdict.GAP

    # The network calms down: what is left arrives or not, and heartbeats go on.
    for message in network.arrivals():
        scheduler.apply(message)
    if scheduler.heartbeat("a", 1, WorkerLoad(last_seq=seq), now=1.0).want_snapshot:
        seq += 1
        assert scheduler.apply(snapshot()) is Verdict.APPLY
    assert not scheduler.heartbeat("a", 1, WorkerLoad(last_seq=seq), now=1.0).want_snapshot
    for path in PATHS:
        for key in path:
            assert scheduler.map.holders(key).get("a") == truth.get(key)
