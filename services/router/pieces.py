"""A judged range of a log: what it holds, when it is long, how it catches up with configs."""

from __future__ import annotations

from typing import NamedTuple

from libs.filters import Rest
from services.router.entries import LogEntry
from services.router.routing import BrokerRules, Columns


class Seen(NamedTuple):
    """An answer of a broker that was asked when all up to a place of the log had been read.

    So those messages were published before any later change of a queue was answered.

    Attributes:
        through: The ID of the last message that had been read.
        revision: The config revision that was durable at the broker.
        incarnation: Which process answered.
    """

    through: int
    revision: int
    incarnation: int


class _CatchUp:
    """The judgement of a piece by queues that changed, under way."""

    __slots__ = ("columns", "entries_count", "left_at", "rest", "revision", "rules")

    def __init__(self, revision: int, rules: BrokerRules) -> None:
        self.revision = revision
        self.rules = rules
        self.columns: Columns = {}
        self.entries_count = 0
        self.left_at = 0  # in the entry that is next
        self.rest: Rest | None = None


THIN = 16
"""A piece with fewer matches for each of its queues is thin: that it names a queue at all costs the
broker as much as dozens of messages."""


class PieceLimits(NamedTuple):
    """How much one piece holds.

    The last of it may go beyond: an entry is judged in parts of which none can have more matches
    than a piece, so a piece has fewer than twice as many; more only where one message has.

    Attributes:
        messages_max: Messages judged: more of them in one call save little, and cost latency.
        thin_max: Messages judged, as long as the piece is thin: see `Piece.is_thin`.
        matches_max: Matches: about 20 bytes each in the call, and a microsecond at the broker.
        step_max: Messages judged between two looks at everything else there is to do.
        hold_ms: How long a piece without any match waits for company.
        gather_ms: How long a thin piece gathers more before it goes, as long as more are there.
        queues_per_ms: A thin piece waits a millisecond for each `queues_per_ms` of its queues, even
            if no more is known of: a third of the time that it is going to take at the broker.
    """

    messages_max: int = 8_192
    thin_max: int = 131_072
    matches_max: int = 65_536
    step_max: int = 512
    hold_ms: int = 1_000
    gather_ms: int = 750
    queues_per_ms: int = 100

    def part_max(self, queues_count: int) -> int:
        """How many messages are judged as one, by the number of queues."""
        return max(1, min(self.step_max, self.matches_max // max(1, queues_count)))

    def halved(self) -> PieceLimits:
        """For a broker to which pieces of these limits are too much."""
        return self._replace(
            messages_max=max(1, self.messages_max // 2),
            thin_max=max(1, self.thin_max // 2),
            matches_max=max(1, self.matches_max // 2),
        )

    def doubled(self, most: PieceLimits) -> PieceLimits:
        """For a broker to which pieces of these limits are not too much."""
        return self._replace(
            messages_max=min(2 * self.messages_max, most.messages_max),
            thin_max=min(2 * self.thin_max, most.thin_max),
            matches_max=min(2 * self.matches_max, most.matches_max),
        )

    def small(self) -> PieceLimits:
        """For pieces that take little memory: a step's messages, some thousand matches."""
        return self._replace(
            messages_max=min(self.messages_max, self.step_max),
            thin_max=min(self.thin_max, self.step_max),
            matches_max=max(1, self.matches_max // 16),
        )

    def less(self, piece: Piece) -> PieceLimits:
        """What a call that holds this piece has room for."""
        return self._replace(
            messages_max=self.messages_max - piece.messages_count,
            thin_max=self.thin_max - piece.messages_count,
            matches_max=self.matches_max - piece.matches_count,
        )

    @property
    def are_used_up(self) -> bool:
        return self.messages_max <= 0 or self.matches_max <= 0


QUEUE_BYTES = 512
"""Memory of a queue's columns, besides what is in them."""

MATCH_BYTES = 64
"""Memory of a match: four numbers in columns, and its ID where no other queue has it."""

GROW_EVERY = 16
"""Answers after which pieces that were made smaller may be twice as large again."""


class Pace:
    """The limits of the pieces that one broker gets now.

    Attributes:
        limits: Smaller while larger ones are too much for the broker.
    """

    def __init__(self, limits: PieceLimits) -> None:
        """Begin with these, which are the largest."""
        self.limits = limits
        self._most = limits
        self._answers_count = 0

    def was_too_much(self) -> bool:
        """Make pieces half as large; False: they cannot be smaller."""
        before, self.limits = self.limits, self.limits.halved()
        return self.limits != before

    def was_answered(self) -> None:
        """The broker takes pieces of this size."""
        self._answers_count += 1
        if not self._answers_count % GROW_EVERY:
            self.limits = self.limits.doubled(self._most)


class Piece:
    """A judged range of the log.

    Attributes:
        previous: The ID of the last message before it.
        last: The ID of the last message in it, or of one that is gone from the end of the log.
        revision: Of the oldest configs that judged any of it.
        entries: What it was made from, kept in case it must be judged again.
        entries_bytes: About what they take in memory, as they are stored.
        columns: The matches, by queue.
        matches_count: How many matches there are in all columns together.
        messages_count: How many messages it has.
        unmatched_count: How many of them reached no queue when they were first judged.
        is_caught_up: Whether it has caught up since it was last sent.
        read_until: The message up to which the log had been read when it was last sent.
        since_ms: When its first entry was judged.
        judged_ms: When its last ones were.
    """

    __slots__ = (
        "_catch_up",
        "_left_at",
        "_rest",
        "columns",
        "entries",
        "entries_bytes",
        "is_caught_up",
        "judged_ms",
        "last",
        "matches_count",
        "messages_count",
        "previous",
        "read_until",
        "revision",
        "since_ms",
        "unmatched_count",
    )

    def __init__(self, previous: int, revision: int, since_ms: int) -> None:
        """Begin an empty piece behind `previous`."""
        self.previous = self.last = previous
        self.revision = revision
        self.since_ms = self.judged_ms = since_ms
        self.entries: list[LogEntry] = []
        self.entries_bytes = 0
        self.columns: Columns = {}
        self.matches_count = 0
        self.messages_count = 0
        self.unmatched_count = 0
        self.is_caught_up = False
        self.read_until = previous
        self._catch_up: _CatchUp | None = None
        self._left_at: int | None = None
        self._rest: Rest | None = None

    @property
    def is_inside_an_entry(self) -> bool:
        """Whether `add` has not come to the end of its entry yet."""
        return self._left_at is not None

    @property
    def is_catching_up(self) -> bool:
        """Whether `step` has more to do before it may be sent."""
        return self._catch_up is not None

    @property
    def catching_up_to(self) -> int | None:
        """The config revision by which `step` judges; None: it is not catching up."""
        return None if self._catch_up is None else self._catch_up.revision

    def catch_up(self, rules: BrokerRules) -> None:
        """Have the queues that changed since it was judged judge it again, in steps."""
        changed = rules.changed_after(self.revision)
        self.is_caught_up = True
        if not changed:
            self.revision = max(self.revision, rules.revision)
            return
        for queue_id in changed:
            column = self.columns.pop(queue_id, None)
            self.matches_count -= len(column.message_ids) if column is not None else 0
        self._catch_up = _CatchUp(rules.revision, rules.only(changed))

    def step(self, messages_max: int) -> int:
        """Judge some of it again; returns how many messages that was. Raises TooSlow."""
        state, count = self._catch_up, 0
        if state is None:
            return 0
        while state.entries_count < len(self.entries) and count < messages_max:
            entry = self.entries[state.entries_count]
            entry.hold()
            judgement = state.rules.judge(entry, state.columns, state.left_at, state.rest)
            entry.release()
            self.matches_count += judgement.matches_count
            state.rest = judgement.rest
            if judgement.left_at is not None:
                count += judgement.left_at - state.left_at
                state.left_at = judgement.left_at
                return count
            count += entry.messages_count - state.left_at
            state.entries_count, state.left_at = state.entries_count + 1, 0
        if state.entries_count == len(self.entries):
            self.columns.update(state.columns)
            self.revision = max(self.revision, state.revision)
            self._catch_up = None
        return count

    def add(self, entry: LogEntry, rules: BrokerRules) -> bool:
        """Judge an entry, or go on with it, and put it at the end once all of it is judged.

        Returns whether it is: if not, it must be the next one again. Raises TooSlow, after which
        the piece is of no use.
        """
        judgement = rules.judge(entry, self.columns, self._left_at or 0, self._rest)
        self.matches_count += judgement.matches_count
        self.unmatched_count += judgement.unmatched_count
        self._left_at, self._rest = judgement.left_at, judgement.rest
        if self._left_at is not None:
            return False
        self.entries.append(entry)
        self.last = entry.last
        self.entries_bytes += entry.stored_bytes
        self.messages_count += entry.messages_count
        return True

    @property
    def memory_bytes(self) -> int:
        columns_bytes = QUEUE_BYTES * len(self.columns) + MATCH_BYTES * self.matches_count
        return self.entries_bytes + columns_bytes

    @property
    def is_thin(self) -> bool:
        """Whether few of its matches share a queue.

        What it costs the broker goes by queues then, more than by messages: a row or two for each.
        So more messages cost little more, and the next piece has the same queues again.
        """
        return self.matches_count < THIN * len(self.columns)

    def is_long(self, limits: PieceLimits) -> bool:
        """Whether it goes as it is, without more behind it."""
        if self.matches_count >= limits.matches_max:
            return True
        return self.messages_count >= (limits.thin_max if self.is_thin else limits.messages_max)
