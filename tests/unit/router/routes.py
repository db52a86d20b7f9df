"""Rules, entries and limits of which tests of routes are made."""

from __future__ import annotations

from collections.abc import Sequence

from libs.filters import Allowance
from libs.storage.records.log_runs import LogRun
from libs.storage.records.metadata import NO_DELAY
from services.router.entries import LogEntry
from services.router.pieces import PieceLimits
from services.router.routing import BrokerRules, QueueRule

LIMITS = PieceLimits(messages_max=4, matches_max=6, step_max=2, hold_ms=1_000)


def rules(revision: int = 1, /, **filters: str) -> BrokerRules:
    made = BrokerRules(Allowance(now_ns=lambda: 0))  # No step ends early on a busy machine.
    made.change([QueueRule(name, source) for name, source in filters.items()], revision)
    made.revision = revision
    return made


def entry(sequence: int, *kinds: str) -> LogEntry:
    runs: list[LogRun] = [
        ((sequence + n, 0, 0, 0, 0), {"kind": kind}, NO_DELAY, (0,), "")
        for n, kind in enumerate(kinds)
    ]
    return LogEntry(runs, 100)


A_ONLY = 'headers["kind"] == "a"'


def changed(known: BrokerRules, **filters: str) -> None:
    """The next revision, with which these queues got these filters."""
    revision = known.revision + 1
    known.change([QueueRule(queue_id, source) for queue_id, source in filters.items()], revision)
    known.revision = revision


class ReadEntry:
    """An entry whose messages can be read again, and how often they were."""

    def __init__(self, sequence: int, *kinds: str) -> None:
        self.reads_count = 0
        self._runs = entry(sequence, *kinds).runs
        self.entry = LogEntry(self._runs, 100, self.read)

    def read(self) -> Sequence[LogRun]:
        self.reads_count += 1
        return self._runs
