"""Puts each worker's numbered reports in order: what to apply, what to drop, when to ask for a snapshot.

Invariant: a report is accepted once, directly after its predecessor of the same epoch; a snapshot is accepted
whenever it is newer than what was accepted. So losing, repeating or reordering reports can delay the picture but not
falsify it. Owned by `cluster.routing.router`.
"""

from __future__ import annotations

from enum import StrEnum

from cluster.core.frontier import FrontierReport


class Verdict(StrEnum):
    APPLY = "apply"
    DUPLICATE = "duplicate"
    STALE = "stale"
    """From another life of the worker than the one registered."""
    GAP = "gap"
    """Something before it is missing: drop it and ask for a snapshot."""


class ReportOrder:
    """The next sequence number expected from one life of one worker. Sequence numbers start at 1."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._next = 1
        self._sent = 0
        """The largest number known to have been given out."""

    @property
    def complete(self) -> bool:
        """Whether everything known to have been sent was applied."""
        return self._next > self._sent

    def judge(self, report: FrontierReport) -> Verdict:
        """Decides on one report and, if it is to be applied, moves on."""
        if report.epoch != self.epoch:
            return Verdict.STALE
        if report.seq < self._next:
            return Verdict.DUPLICATE
        self.note_sent(report.seq)
        if report.seq > self._next and not report.snapshot:
            return Verdict.GAP
        self._next = report.seq + 1
        return Verdict.APPLY

    def note_sent(self, seq: int) -> None:
        """Learns, from a heartbeat, the number of the last report sent: uncovers a lost last one."""
        self._sent = max(self._sent, seq)
