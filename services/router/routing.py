"""What log entries are judged by, and what comes of it: rules, columns of matches."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, KeysView, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from libs.filters import (
    DEFAULT_FILTER,
    DEFAULT_PRIORITY,
    Allowance,
    Facts,
    FilterError,
    OutOfTime,
    QueueOutcome,
    Rest,
    RuleSet,
)
from libs.storage.layout.partitions import Partition
from libs.storage.records.log_runs import LogRun, one_by_one
from services.router.entries import LogEntry

log = logging.getLogger(__name__)


class QueueRule(NamedTuple):
    """One queue as far as routing goes: its expressions, or that it is gone, or why it is left out.

    A filter of None is the default one: the messages whose header `queue` is the queue's ID. With a
    partition it gets those of its matches that the partition selects.
    """

    queue_id: str
    filter: str | None = None
    priority: str = ""
    deleted: bool = False
    fallback_priority: int = DEFAULT_PRIORITY
    default_delay_ms: int = 0
    quarantine: str = ""
    partition: Partition | None = None


class QueueColumns:
    """The matches of one queue in one range of a log, in log order, as columns of equal length.

    Attributes:
        default_delay_ms: Above 0 the queue is a delayed one.
        fallbacks_count: Of the matches, those whose priority could not be evaluated.
        is_plain: Whether all have the default priority and no time. The columns of these are empty
            then: with ten thousand queues each costs a detour through main memory.
    """

    __slots__ = (
        "default_delay_ms",
        "fallbacks_count",
        "is_plain",
        "message_ids",
        "priorities",
        "retention_deadlines_ms",
        "visible_at_ms",
    )

    def __init__(self, default_delay_ms: int = 0) -> None:
        self.default_delay_ms = default_delay_ms
        self.fallbacks_count = 0
        self.is_plain = True
        self.message_ids: list[int] = []
        self.priorities: list[int] = []
        self.retention_deadlines_ms: list[int] = []
        self.visible_at_ms: list[int] = []

    def add(
        self,
        message_ids: Sequence[int],
        priority: int,
        retention_deadlines_ms: Sequence[int],
        visible_at_ms: int,
    ) -> None:
        """Add matches that are not plain, or come after one."""
        if self.is_plain:
            count, self.is_plain = len(self.message_ids), False
            self.priorities = [DEFAULT_PRIORITY] * count
            self.visible_at_ms = [0] * count
        self.message_ids += message_ids
        self.priorities += [priority] * len(message_ids)
        self.retention_deadlines_ms += retention_deadlines_ms
        self.visible_at_ms += [visible_at_ms] * len(message_ids)


Columns = dict[str, QueueColumns]
"""The matches by queue."""


Matches = list[tuple[str, int]]
"""Queues that a message reaches, and its priority in each."""


class Judgement(NamedTuple):
    """What judging an entry, or a part of it, came to: matches, and messages without any.

    Attributes:
        left_at: With which message to go on, since that was a step's work; None: it is done.
        rest: Where to go on inside that message; None: at its beginning.
    """

    matches_count: int
    unmatched_count: int
    left_at: int | None = None
    rest: Rest | None = None


STEP_NS = 5_000_000
"""For so long an entry is judged between two looks at everything else there is to do."""

LOOK_EVERY = 4
"""Messages, or runs of messages that are alike, between two looks at the clock: this many plain
filters take little, and after each evaluation of another one the clock is looked at anyway."""


class BrokerRules:
    """The queues of one broker shard, ready to judge by.

    A filter or priority that this router cannot compile (its broker is newer, say) matches nothing;
    the log and Explain show.

    Attributes:
        revision: The config revision of the shard that these are. Set it when all changes up to it
            are in: until then what is judged counts as judged by the one before.
    """

    def __init__(self, allowance: Allowance | None = None) -> None:
        self.revision = 0
        allowance = allowance or Allowance()
        self._now_ns = allowance.now_ns
        self._rules = RuleSet(allowance)
        self._broken: dict[str, str] = {}
        self._queues: dict[str, QueueRule] = {}
        self._partitions: dict[str, Partition] = {}
        # The revisions with which queues came to be judged otherwise, or not at all; ascending.
        self._changed: dict[str, int] = {}

    @property
    def queues_count(self) -> int:
        return len(self._queues)

    @property
    def queue_ids(self) -> KeysView[str]:
        return self._queues.keys()

    def changed_after(self, revision: int) -> list[str]:
        """The queues that are judged otherwise, or not at all, since this revision."""
        changed = []
        for queue_id, at in reversed(self._changed.items()):
            if at <= revision:
                break
            changed.append(queue_id)
        return changed

    def forget_changes(self, revision: int) -> None:
        """No one is going to ask for changes after a revision below this one."""
        while self._changed:
            queue_id = next(iter(self._changed))
            if self._changed[queue_id] > revision:
                return
            del self._changed[queue_id]

    def only(self, queue_ids: Iterable[str]) -> BrokerRules:
        """The rules of these queues alone."""
        some = BrokerRules()
        some.revision = self.revision
        some._now_ns = self._now_ns
        some._rules = self._rules.only(queue_ids)
        for queue_id in filter(self._queues.__contains__, dict.fromkeys(queue_ids)):
            some._queues[queue_id] = self._queues[queue_id]
            if queue_id in self._partitions:
                some._partitions[queue_id] = self._partitions[queue_id]
            if queue_id in self._broken:
                some._broken[queue_id] = self._broken[queue_id]
        return some

    def change(self, changes: Iterable[QueueRule], revision: int = 0) -> None:
        """Take in queues that changed, by this revision; one that is judged as before is left."""
        for queue in changes:
            queue_id, source = queue.queue_id, queue.filter
            if self._queues.get(queue_id) == (None if queue.deleted else queue):
                continue
            self._changed.pop(queue_id, None)
            self._changed[queue_id] = revision
            self._broken.pop(queue_id, None)
            self._partitions.pop(queue_id, None)
            if queue.deleted:
                self._queues.pop(queue_id, None)
                self._rules.remove(queue_id)
                continue
            self._queues[queue_id] = queue
            if queue.partition is not None:
                self._partitions[queue_id] = queue.partition
            if queue.quarantine:
                self._rules.remove(queue_id)
                self._broken[queue_id] = f"the queue is in quarantine: {queue.quarantine}"
                continue
            try:
                self._rules.replace(
                    queue_id,
                    DEFAULT_FILTER(queue_id) if source is None else source,
                    queue.priority,
                    queue.fallback_priority,
                )
            except FilterError as error:
                self._rules.remove(queue_id)
                self._broken[queue_id] = f"this router cannot read its expressions: {error}"
                log.error("queue %s gets nothing: %s", queue_id, self._broken[queue_id])

    def judge(
        self, entry: LogEntry, columns: Columns, begin: int = 0, rest: Rest | None = None
    ) -> Judgement:
        """Add the matches of an entry's messages to the columns of the queues, from `begin` on.

        Stops when that has taken long, inside a message too: an entry has up to ten thousand
        messages, and there may be ten thousand queues. Go on at `Judgement.left_at` and `rest`;
        queues that changed since it began must judge all of it again. Raises TooSlow; what it has
        added by then is of no use.
        """
        until_ns = self._now_ns() + STEP_NS
        self._rules.fallbacks.clear()  # Of a message that was left to TooSlow.
        runs = _from(entry.runs, begin) if begin else entry.runs
        return self._judge(runs, columns, begin, rest, until_ns)

    def _judge(
        self, runs: Iterable[LogRun], columns: Columns, at: int, rest: Rest | None, until_ns: int
    ) -> Judgement:
        route, fallbacks = self._rules.route, self._rules.fallbacks
        matches_count = unmatched_count = 0
        for number, run in enumerate(runs):
            if number and not number % LOOK_EVERY and self._now_ns() > until_ns:
                return Judgement(matches_count, unmatched_count, at)
            fields, headers, delay, sizes, direct = run
            first_id, _, received, visible, retention_s = fields
            if direct:
                matches = self._direct(run)
            else:
                try:
                    matches = route(headers, fields, delay, sizes[0], until_ns, rest)
                except OutOfTime as out:
                    return Judgement(matches_count, unmatched_count, at, out.rest)
            rest = None
            deadline_ms = received + 1000 * retention_s if retention_s else 0
            message_ids: Sequence[int] = (first_id,)
            deadlines_ms: tuple[int, ...] = (deadline_ms,)
            count = len(sizes)
            if count > 1 and self._are_for_all(run):
                message_ids = tuple(range(first_id, first_id + count))
                deadlines_ms *= count
            elif count > 1:
                first = Rest((), matches, fallbacks.copy())
                fallbacks.clear()
                more = self._judge(one_by_one(run), columns, at, first, until_ns)
                matches_count += more.matches_count
                unmatched_count += more.unmatched_count
                if more.left_at is not None:
                    return Judgement(matches_count, unmatched_count, more.left_at, more.rest)
                at += count
                continue
            at += count
            if not matches:
                unmatched_count += count
                continue
            matches_count += count * len(matches)
            all_ids, all_deadlines_ms = message_ids, deadlines_ms
            for queue_id, priority in matches:
                if queue_id in self._partitions:
                    message_ids = self._partitions[queue_id].select(all_ids, headers)
                    deadlines_ms = all_deadlines_ms[: len(message_ids)]  # All are the same.
                    matches_count -= count - len(message_ids)
                    if not message_ids:
                        continue
                else:
                    message_ids, deadlines_ms = all_ids, all_deadlines_ms
                column = columns.get(queue_id)
                if column is None:
                    default_delay_ms = self._queues[queue_id].default_delay_ms
                    column = columns[queue_id] = QueueColumns(default_delay_ms)
                visible_at_ms = visible
                if column.default_delay_ms and not visible:
                    # A delay of the message's own wins, one of 0 too.
                    visible_at_ms = received + (delay if delay >= 0 else column.default_delay_ms)
                if column.is_plain and priority == DEFAULT_PRIORITY and not visible_at_ms:
                    column.message_ids.extend(message_ids)
                    column.retention_deadlines_ms.extend(deadlines_ms)
                else:
                    column.add(message_ids, priority, deadlines_ms, visible_at_ms)
            if fallbacks:
                self._count_fallbacks(all_ids, headers, columns)
        return Judgement(matches_count, unmatched_count)

    def _count_fallbacks(
        self, message_ids: Sequence[int], headers: Mapping[str, str], columns: Columns
    ) -> None:
        """Count the matches of these messages whose priority failed."""
        for queue_id in self._rules.fallbacks:
            partition = self._partitions.get(queue_id)
            mine = message_ids if partition is None else partition.select(message_ids, headers)
            if mine:
                columns[queue_id].fallbacks_count += len(mine)
        self._rules.fallbacks.clear()

    def _are_for_all(self, run: LogRun) -> bool:
        """Whether the matches of a run's first message, just judged, are the others', too."""
        _, headers, _, sizes, direct = run
        if not self._rules.reads_ids and sizes.count(sizes[0]) == len(sizes):
            return True
        return not direct and self._rules.has_answer(headers)

    def _direct(self, run: LogRun) -> Matches:
        """The match of the first of these messages, which were pushed to one queue."""
        fields, headers, delay, sizes, direct = run
        queue = self._queues.get(direct)
        if queue is None or queue.quarantine:
            return []
        if direct in self._broken:
            return [(direct, queue.fallback_priority)]
        return [(direct, self._rules.priority(direct, headers, fields, delay, sizes[0]))]

    def take_spent(self) -> dict[str, int]:
        """See Allowance: of what these judged, and those made of them by `only`."""
        return self._rules.take_spent()

    def explain(self, message: Facts, queue_ids: Iterable[str]) -> list[QueueOutcome]:
        """What these queues would do with a message, and why; unknown ones are left out.

        So are partitions that would not get it: its ordering header and its ID decide that.
        """
        asked = [
            queue_id
            for queue_id in dict.fromkeys(queue_ids)
            if queue_id in self._queues
            and (
                queue_id not in self._partitions
                or self._partitions[queue_id].select((message.message_id,), message.headers)
            )
        ]
        outcomes = self._rules.explain(message, (one for one in asked if one not in self._broken))
        outcomes += [
            QueueOutcome(
                *(queue_id, False, DEFAULT_PRIORITY, self._broken[queue_id]),
                waits=bool(self._queues[queue_id].quarantine),
            )
            for queue_id in asked
            if queue_id in self._broken
        ]
        return outcomes


def _from(runs: Sequence[LogRun], begin: int) -> Iterator[LogRun]:
    """The runs from this message on; one that it is inside of is taken apart."""
    for run in runs:
        count = len(run[3])
        if begin >= count:
            begin -= count
        elif begin:
            yield from islice(one_by_one(run), begin, None)
            begin = 0
        else:
            yield run
