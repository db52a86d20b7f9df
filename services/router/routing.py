"""What is judged, by what, and what comes of it: log entries, rules, columns of matches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from libs.filters import DEFAULT_FILTER, DEFAULT_PRIORITY, FilterError, QueueOutcome, RuleSet
from libs.storage.log_runs import LogRun, one_by_one

log = logging.getLogger(__name__)


NO_DELAY = -1
"""Stands for the delay of a message that has none of its own; 0 is one."""


class Message(NamedTuple):
    """What filters and priorities see of a message; times in ms since 1970."""

    headers: dict[str, str]
    created_at_ms: int
    received_at_ms: int
    payload_bytes: int


class LogEntry:
    """What one commit of ingest added to the log.

    A router that is behind holds a hundred thousand messages. Read, each that is unlike the others
    takes a kilobyte, stored a tenth of that; and once it is judged nobody looks at it again, unless
    it must be judged anew.

    Attributes:
        sequence: Where it stands in the log.
        messages_count: How many messages it has.
        size_bytes: Its size on the wire.
    """

    __slots__ = ("_held_count", "_read", "_runs", "messages_count", "sequence", "size_bytes")

    def __init__(
        self,
        sequence: int,
        runs: Sequence[LogRun],
        size_bytes: int,
        read: Callable[[], Sequence[LogRun]] | None = None,
    ) -> None:
        """With `read`, which gives its messages again, they need not stay in memory."""
        self.sequence = sequence
        self.messages_count = sum(len(sizes) for _, _, _, sizes, _ in runs)
        self.size_bytes = size_bytes
        self._runs: Sequence[LogRun] | None = runs
        self._read = read
        self._held_count = 0

    @property
    def runs(self) -> Sequence[LogRun]:
        """Its messages; read again where they were let go of."""
        if self._runs is None:
            assert self._read is not None, "only what can be read again is let go of"
            self._runs = self._read()
        return self._runs

    def hold(self) -> None:
        """Somebody is going to judge it, and ends that with `release`."""
        self._held_count += 1

    def release(self) -> None:
        """Who held it has judged it, or will not: without others its messages may go."""
        self._held_count -= 1
        if not self._held_count and self._read is not None:
            self._runs = None


class QueueRule(NamedTuple):
    """One queue as far as routing goes: its expressions, or that it is gone.

    A filter of None is the default one: the messages whose header `queue` is the queue's ID.
    """

    queue_id: str
    filter: str | None = None
    priority: str = ""
    deleted: bool = False
    fallback_priority: int = DEFAULT_PRIORITY
    default_delay_ms: int = 0


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
        """Begin without any."""
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
    """What judging one entry came to: matches, and messages without any."""

    matches_count: int
    unmatched_count: int


class BrokerRules:
    """The queues of one broker shard, ready to judge by.

    A filter or priority that this router cannot compile (its broker is newer, say) matches nothing;
    the log and Explain tell.

    Attributes:
        revision: The config revision of the shard that these are. Set it when all changes up to it
            are in: until then the broker refuses what was judged, since it was under the old one.
    """

    def __init__(self) -> None:
        """Begin without queues, before the first revision."""
        self.revision = 0
        self._rules = RuleSet()
        self._broken: dict[str, str] = {}
        self._queues: dict[str, QueueRule] = {}

    @property
    def queue_ids(self) -> frozenset[str]:
        """The queues known."""
        return frozenset(self._queues)

    def change(self, changes: Iterable[QueueRule]) -> None:
        """Take in queues that changed."""
        for queue in changes:
            queue_id, source = queue.queue_id, queue.filter
            self._broken.pop(queue_id, None)
            if queue.deleted:
                self._queues.pop(queue_id, None)
                self._rules.remove(queue_id)
                continue
            self._queues[queue_id] = queue
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

    def judge(self, entry: LogEntry, columns: Columns) -> Judgement:
        """Add the matches of an entry to the columns of the queues."""
        return self._judge(entry.runs, columns)

    def _judge(self, runs: Iterable[LogRun], columns: Columns) -> Judgement:
        route, fallbacks = self._rules.route, self._rules.fallbacks
        matches_count = unmatched_count = 0
        for run in runs:
            (first_id, created, received, visible, retention_s), headers, delay, sizes, direct = run
            matches = self._direct(run) if direct else route(headers, created, received, sizes[0])
            deadline_ms = received + 1000 * retention_s if retention_s else 0
            message_ids: tuple[int, ...] = (first_id,)
            deadlines_ms: tuple[int, ...] = (deadline_ms,)
            count = len(sizes)
            if count > 1 and self._are_for_all(matches, run):
                message_ids = tuple(range(first_id, first_id + count))
                deadlines_ms *= count
            elif count > 1:
                fallbacks.clear()
                more = self._judge(one_by_one(run), columns)
                matches_count += more.matches_count
                unmatched_count += more.unmatched_count
                continue
            if not matches:
                unmatched_count += count
                continue
            matches_count += count * len(matches)
            for queue_id, priority in matches:
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
                for queue_id in fallbacks:
                    columns[queue_id].fallbacks_count += count
                fallbacks.clear()
        return Judgement(matches_count, unmatched_count)

    def _are_for_all(self, matches: Matches, run: LogRun) -> bool:
        """Whether the matches of a run's first message are those of the others, too."""
        (_, created, received, _, _), headers, _, sizes, direct = run
        if sizes.count(sizes[0]) == len(sizes):
            return True
        # Where headers alone are looked at, the next answer is the very same list.
        return not direct and self._rules.route(headers, created, received, sizes[1]) is matches

    def _direct(self, run: LogRun) -> Matches:
        """The match of the first of these messages, which were pushed to one queue."""
        (_, created, received, _, _), headers, _, sizes, direct = run
        queue = self._queues.get(direct)
        if queue is None:
            return []
        if direct in self._broken:
            return [(direct, queue.fallback_priority)]
        return [(direct, self._rules.priority(direct, headers, created, received, sizes[0]))]

    def explain(self, message: Message, queue_ids: Iterable[str]) -> list[QueueOutcome]:
        """What these queues, which must be known, would do with a message, and why."""
        asked = self._queues.keys() & set(queue_ids)
        sound = asked.difference(self._broken)
        outcomes = self._rules.explain(*message, sound)
        outcomes += [
            QueueOutcome(queue_id, False, DEFAULT_PRIORITY, self._broken[queue_id])
            for queue_id in asked - sound
        ]
        return outcomes
