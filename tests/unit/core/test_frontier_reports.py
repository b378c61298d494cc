"""What the cluster is told: per raw block, whether the target and the draft pool hold it."""

from cluster.core.frontier import BlockState, FrontierReport
from cluster.core.keys import raw_block_keys
from cluster.core.ledger import FrontierReporter
from tests.unit.core.oracle import OracleTensors, make_pair, serve


class Listener:
    """The cluster's picture of one worker, from reports alone."""

    def __init__(self) -> None:
        self.held: dict[bytes, BlockState] = {}

    def apply(self, report: FrontierReport) -> None:
        if report.snapshot:
            self.held.clear()
        for key in report.removed:
            self.held.pop(key, None)
        for state in report.stored:
            assert (state.parent is None) == (state.depth == 0)
            assert state.parent is None or state.parent in self.held
            self.held[state.key] = state


def report(oracle: OracleTensors, reporter: FrontierReporter) -> FrontierReport:
    made = reporter.report(oracle.cache.changes())
    assert made is not None
    return made


def keys(oracle: OracleTensors, tokens: range | list[int]) -> list[bytes]:
    return raw_block_keys(oracle.cache.scope("target"), tokens)


def test_reports_are_numbered_and_say_only_what_changed() -> None:
    oracle, reporter = make_pair(), FrontierReporter("w", epoch=7)
    assert reporter.report(oracle.cache.changes()) is None
    serve(oracle, range(10))
    first = report(oracle, reporter)
    assert (first.worker, first.epoch, first.seq, first.snapshot) == ("w", 7, 1, False)
    assert [state.key for state in first.stored] == keys(oracle, range(10))
    serve(oracle, range(14))
    second = report(oracle, reporter)
    assert (second.seq, [state.depth for state in second.stored]) == (2, [2])
    assert reporter.report(oracle.cache.changes()) is None


def test_a_block_that_one_pool_lost_is_reported_with_what_is_left() -> None:
    oracle, reporter, listener = make_pair(), FrontierReporter("w", 1), Listener()
    serve(oracle, range(16))
    listener.apply(report(oracle, reporter))
    oracle.cache.pools["target"].tree.evict(2)
    listener.apply(report(oracle, reporter))
    states = [listener.held[key] for key in keys(oracle, range(16))]
    assert [(state.target, state.draft) for state in states] == [
        (True, True),
        (True, True),
        (False, True),
        (False, True),
    ]
    oracle.cache.pools["draft"].tree.evict(3)
    listener.apply(report(oracle, reporter))
    assert list(listener.held) == keys(oracle, range(8))


def test_a_raw_block_stays_reported_while_any_successor_of_it_is_held() -> None:
    oracle, reporter, listener = make_pair(), FrontierReporter("w", 1), Listener()
    for successor in (50, 60):  # two draft blocks for the same raw block
        serve(oracle, [*range(8), successor])
    listener.apply(report(oracle, reporter))
    draft = oracle.cache.pools["draft"].tree
    key = keys(oracle, range(8))[1]
    for left in (True, False):
        while draft.cached and sum(key in run.names for run in draft.runs()) > left:
            draft.evict(1)
        changes = oracle.cache.changes()
        if changes.stored or changes.removed:
            listener.apply(FrontierReport("w", 1, 9, changes.stored, changes.removed))
        assert listener.held[key].draft is left


def test_applying_a_report_twice_changes_nothing() -> None:
    oracle, reporter, listener = make_pair(blocks=6), FrontierReporter("w", 1), Listener()
    for base in (100, 200, 300):
        serve(oracle, range(base, base + 12))
        made = report(oracle, reporter)
        listener.apply(made)
        once = dict(listener.held)
        listener.apply(made)
        assert listener.held == once


def test_a_snapshot_holds_all_and_replaces_the_changes_before_it() -> None:
    oracle, listener = make_pair(span=2, draft_block_size=6), Listener()
    reporter = FrontierReporter("w", 1)
    serve(oracle, range(30))
    oracle.cache.pools["draft"].tree.evict(2)
    made = reporter.report(oracle.cache.snapshot())
    assert made is not None and made.snapshot
    listener.apply(made)
    assert [listener.held[key].target for key in keys(oracle, range(28))] == [True] * 7
    drafts = [listener.held[key].draft for key in keys(oracle, range(28))]
    held = 6 * (sum(len(run.blocks) for run in oracle.cache.pools["draft"].tree.runs()))
    assert drafts == [4 * (index + 1) <= held for index in range(7)]
    assert reporter.report(oracle.cache.changes()) is None


def test_an_empty_snapshot_is_told_too() -> None:
    made = FrontierReporter("w", 1).report(make_pair().cache.snapshot())
    assert made == FrontierReport("w", 1, 1, (), (), True)


def test_unread_changes_do_not_pile_up() -> None:
    oracle = make_pair(blocks=4)
    for base in range(100):
        serve(oracle, range(base * 100, base * 100 + 12))
    changes = oracle.cache.changes()
    assert changes.complete
    assert len(changes.stored) <= 8
    assert not oracle.cache.changes().stored
