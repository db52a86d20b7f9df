"""One log on its way to one broker shard, as a plain state machine: no I/O, no clock of its own.

::

    log ──offer──▶ waiting ──judge──▶ judged ──send──▶ in flight ──answered──▶ (assigned, dropped)
                      ▲                  ╎             ▲  │  ╎
                      └──────────────────┼─────────────┼──┴──┼── lost, or refused for its place
                                         └╌ catch up ╌╌┴╌╌╌╌╌┘   (outdated)

    cursor ≤ in flight ≤ judged ≤ waiting ≤ position: IDs of messages, no gap between any two

The broker decides: it applies a range only at its cursor, and only if the queues that changed
before the range could be read have judged it by what they are since then. So whatever a route
believes, and however many routers believe it, an entry is assigned once; a wrong belief costs a
refused call. What this class must get right is the rest: to send no range with a hole in it, to
label no judgement with configs newer than those it was made by, and to let go of no entry too
early.

A piece is labelled with the oldest configs that judged any of it. Queues that changed since judge
all of it again, and they alone: it catches up. It does so once before it is sent, to what is known
then, and once more when it was refused for a change that was not known; what changes while it
catches up does not matter, as the broker knows when the piece had been read.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence

from services.router.entries import LogEntry
from services.router.pieces import Piece, PieceLimits, Seen
from services.router.routing import BrokerRules
from slatemq._byte_budget import ByteBudget


class Route:
    """The state of one (log, broker shard) pair.

    Attributes:
        cursor: The broker's cursor, by its last response.
        position: The message up to which the log was offered; those behind it are wanted next.
        in_flight: What was sent and not answered yet, or was refused as outdated.
        is_outdated: Whether it was refused so: it catches up, and goes again.
        judged: What is judged and waits: for the answer, or for the first match behind it.
        seen: What the broker answered last.
        pending_count: Messages that it holds.
        pending_bytes: Their size on the wire, with headers.
    """

    __slots__ = (
        "_budget",
        "_counted_bytes",
        "_waiting",
        "_waiting_bytes",
        "cursor",
        "in_flight",
        "is_outdated",
        "judged",
        "pending_bytes",
        "pending_count",
        "position",
        "seen",
    )

    def __init__(self, cursor: int = 0, budget: ByteBudget | None = None) -> None:
        """Begin behind the broker's cursor without messages; `budget` is for all routes."""
        self._budget = budget or ByteBudget(sys.maxsize)
        self._counted_bytes = 0
        self._waiting_bytes = 0
        self.cursor = cursor
        self.position = cursor
        self.in_flight: Piece | None = None
        self.is_outdated = False
        self.judged: Piece | None = None
        self.seen: Seen | None = None
        self._waiting: deque[LogEntry] = deque()
        self.pending_count = 0
        self.pending_bytes = 0

    @property
    def waiting_count(self) -> int:
        judged = [piece for piece in (self.judged, self.in_flight) if piece is not None]
        return self.pending_count - sum(piece.messages_count for piece in judged)

    @property
    def oldest_received_ms(self) -> int | None:
        """When ingest received the first message that it holds; None: it holds none.

        For metrics: another thread may ask, and a change meanwhile is as good as one before.
        """
        for piece in (self.in_flight, self.judged):
            first = next(iter(piece.entries), None) if piece is not None else None
            if first is not None:
                return first.received_at_ms
        first = next(iter(self._waiting.copy()), None)
        return None if first is None else first.received_at_ms

    @property
    def memory_bytes(self) -> int:
        """About what it holds in memory. What several routes share counts for each of them."""
        pieces = [piece for piece in (self.judged, self.in_flight) if piece is not None]
        return self._waiting_bytes + sum(piece.memory_bytes for piece in pieces)

    @property
    def must_drain(self) -> bool:
        """Whether all routes together hold too much, and this one some of it.

        It may not be offered more then, and goes on with small pieces, until it holds nothing: so
        each route moves on, whatever the others hold.
        """
        return self._budget.is_full and self.pending_count > 0

    @property
    def is_behind(self) -> bool:
        """Whether it was offered more than the broker has, as far as is known."""
        return self.cursor < self.position

    def offer(self, after: int, entries: Sequence[LogEntry], through: int = 0) -> None:
        """Take what the log holds behind `after`; what it holds already is left out.

        `through` may be behind the last entry: of the messages up to there no other one is left.

        Raises:
            ValueError: There is a hole between what it holds and these.
        """
        if after > self.position:
            raise ValueError(f"entries behind {after} do not join on to {self.position}")
        for entry in entries:
            if entry.last > self.position:
                if entry.first <= self.position:
                    entry = entry.between(self.position, entry.last)
                entry.hold()
                self._waiting.append(entry)
                self._waiting_bytes += entry.memory_bytes
                self.position = entry.last
                self.pending_count += entry.messages_count
                self.pending_bytes += entry.size_bytes
        self.position = max(self.position, through)
        self._count_memory()

    @property
    def next_piece(self) -> Piece | None:
        """What is to be sent next, when it is due; None: there is nothing, or the answer is due."""
        if self.in_flight is None:
            return self.judged
        return self.in_flight if self.is_outdated else None

    @property
    def revision(self) -> int | None:
        """Of the oldest configs that judged any piece; None: there is none."""
        pieces = [piece.revision for piece in (self.in_flight, self.judged) if piece is not None]
        return min(pieces, default=None)

    def judge(self, rules: BrokerRules, now_ms: int, limits: PieceLimits) -> int:
        """Judge a step of what catches up, or else of what waits.

        Returns how many messages were judged. Raises TooSlow: call `judge_anew`.
        """
        try:
            return self._judge(rules, now_ms, limits)
        finally:
            self._count_memory()

    def _judge(self, rules: BrokerRules, now_ms: int, limits: PieceLimits) -> int:
        catching_up = self._catching_up()
        if catching_up is not None:
            count = catching_up.step(limits.step_max)
            if catching_up.matches_count > 2 * limits.matches_max:
                self._unjudge()  # Into pieces of a size that can be sent.
            return count
        if not self.can_judge(limits):
            return 0
        if self.judged is None:
            self.judged = Piece(self._judged_through, rules.revision, now_ms)
        piece = self.judged
        piece.judged_ms = now_ms
        begin = piece.messages_count
        part_max = self._limits(limits).part_max(rules.queues_count)
        step_end = begin + limits.step_max
        while self._waiting and self.can_judge(limits) and piece.messages_count < step_end:
            while not piece.is_inside_an_entry and self._waiting[0].messages_count > part_max:
                whole = self._take_first()
                self._requeue(whole.parts(part_max))
                whole.release()
            if not piece.add(self._waiting[0], rules):
                break
            self._take_first().release()
        if not self._waiting:
            piece.last = self.position
        return piece.messages_count - begin

    def judging_revision(self, rules: BrokerRules) -> int:
        """Of the configs by which `judge` goes on: a piece that catches up keeps to those then."""
        piece = self._catching_up()
        revision = None if piece is None else piece.catching_up_to
        return rules.revision if revision is None else revision

    def judge_again(self) -> None:
        """Let go of judgements that are not on their way; after TooSlow they are of no use."""
        self._unjudge_next()
        if self.is_outdated and self.in_flight is not None:
            self._requeue(self.in_flight.entries)
            self.in_flight, self.is_outdated = None, False
        self._count_memory()

    def refresh_waiting(self, rules: BrokerRules, limits: PieceLimits) -> None:
        """What waits for its first match catches up with new configs, unless it is much."""
        piece = self.next_piece
        if piece is None or piece is self.in_flight or piece.columns or piece.is_catching_up:
            return
        if piece.is_inside_an_entry:
            return
        if piece.revision < rules.revision and piece.messages_count <= limits.step_max:
            self.catch_up(rules)

    def catch_up(self, rules: BrokerRules) -> None:
        """Have the queues that changed judge the next piece, if there is one, again."""
        piece = self.next_piece
        if piece is not None:
            piece.catch_up(rules)
            self._count_memory()

    def can_judge(self, limits: PieceLimits) -> bool:
        """Whether something catches up, or waits and the judged piece has room for it."""
        if self._catching_up() is not None:
            return True
        if not self._waiting:
            return self._judged_through < self.position
        if self.judged is None:
            return True
        return self.judged.is_inside_an_entry or not self.judged.is_long(self._limits(limits))

    @property
    def _judged_through(self) -> int:
        piece = self.judged or self.in_flight
        return self.cursor if piece is None else piece.last

    def _limits(self, limits: PieceLimits) -> PieceLimits:
        return limits.small() if self.must_drain else limits

    def _catching_up(self) -> Piece | None:
        for piece in (self.in_flight, self.judged):
            if piece is not None and piece.is_catching_up:
                return piece
        return None

    def due_ms(self, limits: PieceLimits, *, more: bool = False) -> int | None:
        """When to send the next piece: 0 = now, else the time; None = there is nothing to send.

        A piece with matches, or a long one, goes immediately. One without matches is held for a
        while, and so is one with few matches while there is `more` to come, so that most of its
        queues cost the broker one assignment instead of two. (After a pause it is not known for
        the first piece whether there is more, hence the few milliseconds.)
        """
        piece = self.next_piece
        if piece is None or piece.is_catching_up or piece.is_inside_an_entry:
            return None
        if self.is_outdated or piece.is_long(self._limits(limits)):
            return 0
        if self.must_drain and not self._waiting:
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
        """Put the next piece in flight.

        Raises:
            ValueError: There is none, it is catching up, or another one is in flight.
        """
        piece = self.next_piece
        if piece is None or piece.is_catching_up or piece.is_inside_an_entry:
            raise ValueError("nothing to send, or not yet")
        if self.is_outdated:
            self.is_outdated = False
        else:
            self.in_flight, self.judged = piece, None
        piece.is_caught_up = False
        piece.read_until = self.position
        return piece

    def seen_of(self, piece: Piece) -> Seen | None:
        """The answer that counts for all of a piece, once it has caught up with its revision."""
        seen = self.seen
        if seen is None or piece.last > seen.through or piece.revision < seen.revision:
            return None
        return seen

    def outdated(self, rules: BrokerRules) -> None:
        """The piece in flight was refused for changes, which these rules have: it catches up."""
        if self.in_flight is not None:
            self.is_outdated = True
            self.catch_up(rules)

    def answered(self, cursor: int) -> None:
        """The piece in flight was answered, applied or refused: go on from that cursor."""
        piece, self.in_flight = self.in_flight, None
        self.is_outdated = False
        if piece is not None and cursor == piece.last:
            self._let_go(piece.entries)
            self.cursor = cursor
            self._count_memory()
            return
        self.in_flight = piece
        self.adopt(cursor)

    def lost(self) -> None:
        """No answer will come, or none that could be read: what was in flight goes again."""
        self._unjudge()
        self._count_memory()

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
        self._count_memory()

    def forget(self) -> None:
        """Let go of everything that is not in flight, to free memory; it is wanted again."""
        piece, self.in_flight = self.in_flight, None
        is_outdated = self.is_outdated
        self._unjudge()
        self._drop_waiting(self.position)
        self.in_flight, self.is_outdated = piece, is_outdated
        self.position = self.cursor if piece is None else piece.last
        self._count_memory()

    def _unjudge(self) -> None:
        """Put what is judged, and what is in flight, back in front of what waits."""
        self._unjudge_next()
        if self.in_flight is not None:
            self._requeue(self.in_flight.entries)
            self.in_flight, self.is_outdated = None, False

    def _unjudge_next(self) -> None:
        if self.judged is not None:
            self._requeue(self.judged.entries)
            self.judged = None

    def _requeue(self, entries: Sequence[LogEntry]) -> None:
        for entry in reversed(entries):
            entry.hold()
            self._waiting.appendleft(entry)
            self._waiting_bytes += entry.memory_bytes

    def _take_first(self) -> LogEntry:
        entry = self._waiting.popleft()
        self._waiting_bytes -= entry.memory_bytes
        return entry

    def _drop_waiting(self, until: int) -> None:
        """Let go of what waits, up to this message."""
        while self._waiting and self._waiting[0].first <= until:
            entry = self._take_first()
            self._let_go((entry,))
            if entry.last > until:
                rest = entry.between(until, entry.last)
                self.pending_count += rest.messages_count
                self.pending_bytes += rest.size_bytes
                self._requeue((rest,))
            entry.release()
            if entry.last > until:
                return

    def _let_go(self, entries: Iterable[LogEntry]) -> None:
        for entry in entries:
            self.pending_count -= entry.messages_count
            self.pending_bytes -= entry.size_bytes

    def _count_memory(self) -> None:
        """Have the budget know what is held now; to be called after every change of that."""
        counted_bytes, self._counted_bytes = self._counted_bytes, self.memory_bytes
        self._budget.change(counted_bytes, self._counted_bytes)
