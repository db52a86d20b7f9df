"""One log on its way to one broker shard, as a plain state machine: no I/O, no clock of its own.

::

    log ──offer──▶ waiting ──judge──▶ judged ──send──▶ in flight ──answered──▶ (assigned, dropped)
                      ▲                  │                │
                      └── new configs ───┴─ refused, lost ┘

    cursor ≤ in flight ≤ judged ≤ waiting ≤ position: sequences, each part without a gap to the next

The broker decides: it applies a range only at its cursor and only by its current configs. So
whatever a route believes, and however many routers believe it, an entry is assigned once; a wrong
belief costs a refused call. What this class must get right is the rest: to send no range with a
hole in it, to label no judgement with configs that it was not made by, and to let go of no entry
too early.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from services.router.routing import Columns, Judgement, LogEntry


class Rules(Protocol):
    """The queues of one broker shard, as far as judging goes."""

    @property
    def revision(self) -> int:
        """The config revision of the shard by which `judge` judges."""

    def judge(self, entry: LogEntry, columns: Columns) -> Judgement:
        """Add the matches of an entry to the columns of the queues."""


THIN = 16
"""A piece with fewer matches for each of its queues is thin: that it names a queue at all costs the
broker as much as dozens of messages."""


class PieceLimits(NamedTuple):
    """How much one piece holds; an entry is never split, so the last one may go beyond.

    Attributes:
        messages_max: Messages judged: more of them in one call save little, and cost latency.
        thin_max: Messages judged, as long as the piece is thin: see `Piece.is_thin`.
        matches_max: Matches: about 20 bytes each in the call.
        step_max: Messages judged between two looks at everything else there is to do.
        hold_ms: How long a piece without any match waits for company.
        gather_ms: How long a thin piece gathers more before it goes, as long as more are at hand.
        queues_per_ms: A thin piece waits a millisecond for each so many of its queues even if no
            more is known of: a third of the time that it is going to take at the broker.
    """

    messages_max: int = 8_192
    thin_max: int = 131_072
    matches_max: int = 200_000
    step_max: int = 512
    hold_ms: int = 1_000
    gather_ms: int = 750
    queues_per_ms: int = 100

    def less(self, piece: Piece) -> PieceLimits:
        """What a call that holds this piece has room for."""
        return self._replace(
            messages_max=self.messages_max - piece.messages_count,
            thin_max=self.thin_max - piece.messages_count,
            matches_max=self.matches_max - piece.matches_count,
        )

    @property
    def are_used_up(self) -> bool:
        """Whether there is no room left."""
        return self.messages_max <= 0 or self.matches_max <= 0


class Piece:
    """A judged range of the log.

    Attributes:
        previous: Sequence of the last entry before it.
        revision: Of the configs that judged it.
        entries: What it was made from, kept in case it must be judged again.
        columns: The matches, by queue.
        matches_count: How many matches there are in all columns together.
        messages_count: How many messages it has.
        unmatched_count: How many of them reached no queue.
        since_ms: When its first entry was judged.
        judged_ms: When its last ones were.
    """

    __slots__ = (
        "columns",
        "entries",
        "judged_ms",
        "matches_count",
        "messages_count",
        "previous",
        "revision",
        "since_ms",
        "unmatched_count",
    )

    def __init__(self, previous: int, revision: int, since_ms: int) -> None:
        """Begin an empty piece behind `previous`."""
        self.previous = previous
        self.revision = revision
        self.since_ms = self.judged_ms = since_ms
        self.entries: list[LogEntry] = []
        self.columns: Columns = {}
        self.matches_count = 0
        self.messages_count = 0
        self.unmatched_count = 0

    def add(self, entry: LogEntry, rules: Rules) -> None:
        """Judge an entry and put it at the end."""
        judgement = rules.judge(entry, self.columns)
        self.entries.append(entry)
        self.messages_count += entry.messages_count
        self.matches_count += judgement.matches_count
        self.unmatched_count += judgement.unmatched_count

    @property
    def last(self) -> int:
        """Sequence of the last entry in it."""
        return self.entries[-1].sequence if self.entries else self.previous

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


class Route:
    """The state of one (log, broker shard) pair.

    Attributes:
        cursor: The broker's cursor, as last told.
        position: Sequence up to which the log was offered; entries behind it are wanted next.
        in_flight: What was sent and not answered yet.
        judged: What is judged and waits: for the answer, or for the first match behind it.
        pending_count: Messages in hand.
        pending_bytes: Their size on the wire, with headers.
    """

    __slots__ = (
        "_waiting",
        "cursor",
        "in_flight",
        "judged",
        "pending_bytes",
        "pending_count",
        "position",
    )

    def __init__(self, cursor: int = 0) -> None:
        """Begin behind the broker's cursor with nothing in hand."""
        self.cursor = cursor
        self.position = cursor
        self.in_flight: Piece | None = None
        self.judged: Piece | None = None
        self._waiting: deque[LogEntry] = deque()
        self.pending_count = 0
        self.pending_bytes = 0

    @property
    def waiting_count(self) -> int:
        """Of the messages in hand, those that are not judged."""
        judged = [piece for piece in (self.judged, self.in_flight) if piece is not None]
        return self.pending_count - sum(piece.messages_count for piece in judged)

    def offer(self, after: int, entries: Sequence[LogEntry]) -> None:
        """Take what the log holds behind `after`; what is in hand already is left out.

        Raises:
            ValueError: There is a hole between what is in hand and these.
        """
        if after > self.position:
            raise ValueError(f"entries behind {after} do not join on to {self.position}")
        for entry in entries:
            if entry.sequence > self.position:
                entry.hold()
                self._waiting.append(entry)
                self.position = entry.sequence
                self.pending_count += entry.messages_count
                self.pending_bytes += entry.size_bytes

    def judge(self, rules: Rules, now_ms: int, limits: PieceLimits) -> int:
        """Judge a step of what waits; a judgement by other configs is thrown away first.

        Returns how many messages were judged.
        """
        if self.judged is not None and self.judged.revision != rules.revision:
            self._unjudge_next()
        if not self._waiting:
            return 0
        if self.judged is None:
            previous = self.cursor if self.in_flight is None else self.in_flight.last
            self.judged = Piece(previous, rules.revision, now_ms)
        piece = self.judged
        piece.judged_ms = now_ms
        begin = piece.messages_count
        while self.can_judge(limits) and piece.messages_count < begin + limits.step_max:
            entry = self._waiting.popleft()
            piece.add(entry, rules)
            entry.release()
        return piece.messages_count - begin

    def can_judge(self, limits: PieceLimits) -> bool:
        """Whether something waits for which the judged piece has room."""
        return bool(self._waiting) and (self.judged is None or not self.judged.is_long(limits))

    def due_ms(self, limits: PieceLimits, *, more: bool = False) -> int | None:
        """When the judged piece is to go: 0 = now, else the time; None = nothing can go.

        Matches go at once, and so does a piece that is long. One without a match is held a while,
        and so is a thin one while there is `more` to come at once: what is behind it waits anyway,
        and less so if most of its queues are told once, not twice. (That there is more is not
        known for the first piece after a pause, hence the few milliseconds.)
        """
        piece = self.judged
        if piece is None or self.in_flight is not None:
            return None
        if piece.is_long(limits):
            return 0
        if not piece.columns:
            return piece.since_ms + limits.hold_ms
        if not piece.is_thin:
            return 0
        if more or self._waiting:
            return piece.since_ms + limits.gather_ms
        wait_ms = len(piece.columns) // limits.queues_per_ms
        return piece.judged_ms + wait_ms if wait_ms else 0

    def send(self) -> Piece:
        """Put the judged piece in flight.

        Raises:
            ValueError: There is none, or another one is in flight.
        """
        if self.judged is None or self.in_flight is not None:
            raise ValueError("nothing to send, or not yet")
        self.in_flight, self.judged = self.judged, None
        return self.in_flight

    def answered(self, cursor: int) -> None:
        """The piece in flight was answered, applied or refused: go on from the cursor told."""
        piece, self.in_flight = self.in_flight, None
        if piece is not None and cursor == piece.last:
            self._let_go(piece.entries)
            self.cursor = cursor
            return
        self.in_flight = piece
        self.adopt(cursor)

    def lost(self) -> None:
        """No answer will come, or none that could be read: what was in flight goes again."""
        self._unjudge()

    def adopt(self, cursor: int) -> None:
        """Go on from this cursor of the broker, which nothing that is in flight can change.

        What is at or below it is done. A cursor below the one known (a broker put back to an older
        state) leaves a hole before what is in hand: then nothing stays in hand, and the log is
        wanted from there.
        """
        self._unjudge()
        if cursor < self.cursor:
            self._drop_waiting(self.position)
            self.position = cursor
        self._drop_waiting(cursor)
        self.cursor = cursor
        self.position = max(self.position, cursor)

    def forget(self) -> None:
        """Let go of everything that is not in flight, to free memory; it is wanted again."""
        piece, self.in_flight = self.in_flight, None
        self._unjudge()
        self._drop_waiting(self.position)
        self.in_flight = piece
        self.position = self.cursor if piece is None else piece.last

    def _unjudge(self) -> None:
        """Put what is judged, and what is in flight, back in front of what waits."""
        self._unjudge_next()
        if self.in_flight is not None:
            self._wait_again(self.in_flight)
            self.in_flight = None

    def _unjudge_next(self) -> None:
        if self.judged is not None:
            self._wait_again(self.judged)
            self.judged = None

    def _wait_again(self, piece: Piece) -> None:
        for entry in reversed(piece.entries):
            entry.hold()
            self._waiting.appendleft(entry)

    def _drop_waiting(self, until: int) -> None:
        """Let go of what waits, up to this sequence."""
        while self._waiting and self._waiting[0].sequence <= until:
            entry = self._waiting.popleft()
            entry.release()
            self._let_go((entry,))

    def _let_go(self, entries: Iterable[LogEntry]) -> None:
        for entry in entries:
            self.pending_count -= entry.messages_count
            self.pending_bytes -= entry.size_bytes
