"""What clients of a simulated world must never see.

The rules are those of the documentation, said again from its words; nothing of the services is
used here. What is not certain, such as a publish without an answer, may have happened or not.

The world has one order of events: what clients began and what was answered to them. A thing comes
after another for certain where it began after the other was answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.partition_rule import partition_of

NEVER = 1 << 62
"""A moment that is not reached."""


class Violated(Exception):
    """A rule was broken."""


class Apart(NamedTuple):
    """By how much a clock was ahead of that of clients, in milliseconds: the least and the most."""

    least_ms: int = 0
    most_ms: int = 0


TOGETHER = Apart()


@dataclass
class Span:
    """From the moment at which a client began something to that of its answer."""

    began: int
    answered: int = NEVER


@dataclass
class Loss(Span):
    """A purge of all, or a deletion, of a queue.

    Attributes:
        listed: The IDs of messages that a client saw in the queue before it.
    """

    listed: frozenset[int] = frozenset()


@dataclass
class Relocation(Span):
    """A move of a queue, or of a partition of it, to another broker.

    Attributes:
        partition: Which of them; None: all of the queue.
    """

    partition: int | None = None


@dataclass
class Content(Span):
    """What a message has from the answer of an edit on.

    Attributes:
        tail: Of its payload, behind its key.
    """

    tail: bytes = b""


@dataclass
class _Lease:
    """What a claim gave.

    Attributes:
        claimed: When its claim began: the lease may be as old as this, and was given later.
    """

    token: str
    deadline_ms: int
    attempt: int
    claimed: int
    given: int
    given_ms: int
    is_ended: bool = False


@dataclass
class _Copy:
    """A message in one queue.

    Attributes:
        maybe_dropped: It may have ended without an ack.
        dropped: The moment from which on it had ended so.
        maybe_acked_by: The leases of acks that may have counted.
        finished_by: The one thing that finished it, such as the payload that was pushed with it.
        nacked_ms: When its last nack began.
        nacked_by: How far the clock by which it was nacked was apart.
        not_before_ms: From when on it may come again after that.
    """

    leases: list[_Lease] = field(default_factory=list)
    acked: bool = False
    maybe_dropped: bool = False
    dropped: int = NEVER
    maybe_acked_by: set[str] = field(default_factory=set)
    finished_by: str = ""
    nacked_ms: int = 0
    nacked_by: Apart = TOGETHER
    not_before_ms: int = 0
    ids: set[int] = field(default_factory=set)

    @property
    def maybe_ended(self) -> bool:
        return self.acked or self.maybe_dropped or bool(self.maybe_acked_by)


@dataclass
class _Sent:
    """A publish, or a push of commands.

    Attributes:
        only: The one queue that a push is for.
        source: What a push finishes with itself: queue and payload.
        is_refused: It was refused, or is not permitted, so it must never be seen.
        contents: What it was published with, and what edits made of it, in their order.
        gone_ms: From when on no claim may give it, by the clock of its ingest; 0: unknown.
        retention_ms: How long after its receipt that is; 0: it is kept.
    """

    headers: Mapping[str, str]
    visible_at_ms: int
    began: int
    began_ms: int
    answered: bool = False
    only: str = ""
    source: tuple[str, bytes] | None = None
    is_refused: bool = False
    ids: set[int] = field(default_factory=set)
    contents: list[Content] = field(default_factory=lambda: [Content(0, 0)])
    retention_ms: int = 0
    gone_ms: int = 0


@dataclass
class _Filter(Span):
    """A filter of a queue: one header and its value; None takes all."""

    header: str | None = None
    value: str | None = None

    def takes(self, headers: Mapping[str, str]) -> bool:
        return self.header is None or headers.get(self.header) == self.value


@dataclass
class _Queue:
    """What clients did to a queue.

    Attributes:
        losses: Purges and deletions: what was in it then is gone.
        pauses: From the answer of each pause to the beginning of its end.
        redrives: Of its dead letters, whose attempts count from 1 again.
        relocations: To another broker: leases from before end, and their attempts do not count.
        partitions_count: How many partitions it has.
        attempts_max: Of one message, until it is a dead letter.
        fed_from: The queue whose messages move here; no other message comes here.
        since_ms: What was published before may not be there; 0: all is.
    """

    made: Span
    filters: list[_Filter] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    pauses: list[Span] = field(default_factory=list)
    redrives: list[Span] = field(default_factory=list)
    relocations: list[Relocation] = field(default_factory=list)
    partitions_count: int = 1
    attempts_max: int = 0
    fed_from: str = ""
    is_replayed: bool = False
    since_ms: int = 0
    moves_in: dict[bytes, bool] = field(default_factory=dict)


def together(queue: str, partition: int | None, since_ms: int) -> Apart:
    """Of clocks that agree with those of clients."""
    return TOGETHER


class Judge:
    """Judges each thing that a client sees, when it sees it.

    Attributes:
        slack_ms: How far the clocks of ingests may be apart from those of clients.
        apart: How far the clock of the broker of a queue's partition was since a time by a client's
            clock; where no partition is named, those of all.
        changes: By type and queue, how many events there are of its changes: the least, the most.
        events_of_messages: Types, queues and message IDs of which there is an event.
    """

    def __init__(
        self, slack_ms: int = 0, apart: Callable[[str, int | None, int], Apart] = together
    ) -> None:
        self.slack_ms = slack_ms
        self.apart = apart
        self.queues: dict[str, _Queue] = {}
        self.sent: dict[bytes, _Sent] = {}
        self.copies: dict[tuple[str, bytes], _Copy] = {}
        self.changes: dict[tuple[str, str], tuple[int, int]] = {}
        self.events_of_messages: dict[tuple[str, str, int], None] = {}
        self.delivered = 0
        self.acked = 0
        self.redelivered = 0
        self._moment = 0

    def now(self) -> int:
        """The next moment."""
        self._moment += 1
        return self._moment

    # --- Queues -------------------------------------------------------------

    def creating(
        self,
        name: str,
        header: str | None = None,
        value: str | None = None,
        *,
        attempts_max: int = 0,
        fed_from: str = "",
        is_replayed: bool = False,
        partitions_count: int = 1,
    ) -> _Queue:
        """A client is about to create a queue; `is_replayed`: it starts in the past."""
        moment = self.now()
        known = self.queues.get(name)
        queue = self.queues[name] = _Queue(
            Span(moment),
            attempts_max=attempts_max,
            fed_from=fed_from,
            is_replayed=is_replayed,
            partitions_count=partitions_count,
        )
        if known is not None:
            # What a claim on the deleted one still brings was judged by its last filter.
            queue.losses, queue.filters = known.losses, known.filters[-1:]
        queue.filters.append(_Filter(moment, header=header, value=value))
        return queue

    def created(self, name: str, since_ms: int = 0) -> None:
        """The queue is there; a replay has all that was published since then."""
        queue = self.queues[name]
        queue.since_ms = since_ms
        queue.made.answered = queue.filters[-1].answered = self.now()

    def changing(self, name: str, header: str | None, value: str | None) -> Span:
        """A filter is about to change; `done` tells the answer."""
        change = _Filter(self.now(), header=header, value=value)
        self.queues[name].filters.append(change)
        return change

    def losing(self, name: str, listed: Iterable[int] = ()) -> Loss:
        """A purge of all, or a deletion, is about to happen: its leases may end from now on.

        `listed` are the IDs of messages that a client saw in the queue before.
        """
        loss = Loss(self.now(), listed=frozenset(listed))
        self.queues[name].losses.append(loss)
        for (queue, _), copy in self.copies.items():
            if queue == name:
                for lease in copy.leases:
                    lease.is_ended = True
        return loss

    @contextmanager
    def change(self, kind: str, queue: str, *, is_once: bool = True) -> Iterator[None]:
        """Within, a client changes a queue until that is answered, and that has an event.

        `is_once`: one event, however often it is tried.
        """
        self.may_change(kind, queue, is_once=is_once)
        yield
        self.has_changed(kind, queue)

    def may_change(self, kind: str, queue: str, *, is_once: bool) -> None:
        """A client begins to change a queue, which may have an event. See `change`."""
        least, most = self.changes.get((kind, queue), (0, 0))
        self.changes[kind, queue] = least, most + (1 if is_once else NEVER)

    def has_changed(self, kind: str, queue: str) -> None:
        """The answer says that something was changed: there must be an event."""
        least, most = self.changes[kind, queue]
        self.changes[kind, queue] = least + 1, most

    def done(self, span: Span) -> None:
        span.answered = self.now()

    def redriving(self, name: str) -> Span:
        """Dead letters of a queue may come again from now on; `done` tells that all have."""
        redrive = Span(self.now())
        self.queues[name].redrives.append(redrive)
        return redrive

    def relocating(self, name: str, partition: int | None = None) -> Relocation:
        """A queue, or this partition, may move to another broker; `done` tells that it is there."""
        relocation = Relocation(self.now(), partition=partition)
        self.queues[name].relocations.append(relocation)
        return relocation

    def paused(self, name: str) -> Span:
        """A pause was answered; `done` tells that its end begins."""
        pause = Span(self.now())
        self.queues[name].pauses.append(pause)
        return pause

    # --- Producers ----------------------------------------------------------

    def publishing(
        self,
        key: bytes,
        headers: Mapping[str, str],
        visible_at_ms: int,
        now_ms: int,
        tail: bytes = b"",
        retention_ms: int = 0,
    ) -> None:
        """A client is about to publish this message, for the first time."""
        self.sent[key] = _Sent(
            headers,
            visible_at_ms,
            self.now(),
            now_ms,
            contents=[Content(0, 0, tail)],
            retention_ms=retention_ms,
        )

    def forbidden(self, key: bytes) -> None:
        """No rule permits the publish of this message: it must never be seen."""
        self.sent[key].is_refused = True

    def published(self, key: bytes, message_id: int, received_ms: int = 0) -> None:
        """The publish was answered; an ID of 0: it is accepted, and stored later."""
        sent = self.sent[key]
        sent.answered = True
        if message_id:
            self._same_message(key, message_id)
            # Of a repeat, this is when it came: the first one came earlier.
            if sent.retention_ms and received_ms:
                sent.gone_ms = max(sent.gone_ms, received_ms + sent.retention_ms)

    def editing(self, key: bytes, message_id: int, tail: bytes) -> Content:
        """The content of a message is about to change; `done` tells the answer."""
        self._same_message(key, message_id)
        content = Content(self.now(), tail=tail)
        self.sent[key].contents.append(content)
        return content

    def edited(self, queue: str, key: bytes, message_id: int, content: Content) -> None:
        self.done(content)
        self.events_of_messages["message.edited", queue, message_id] = None

    # --- Consumers ----------------------------------------------------------

    def delivered_to(
        self,
        queue: str,
        key: bytes,
        headers: Mapping[str, str],
        message_id: int,
        token: str,
        attempt: int,
        deadline_ms: int,
        now_ms: int,
        claimed: int = NEVER,
        claimed_ms: int = 0,
        tail: bytes = b"",
    ) -> None:
        """A claim, begun at the moment `claimed` and the time `claimed_ms`, gave this message."""
        self.delivered += 1
        sent = self.sent.get(key)
        if sent is None:
            raise Violated(f"{queue} delivers {key!r}, which nobody published")
        if dict(headers) != dict(sent.headers):
            raise Violated(f"{queue} delivers {key!r} with other headers: {dict(headers)}")
        self._may_be_there(queue, key, sent, message_id)
        copy = self.copies.setdefault((queue, key), _Copy())
        self._is_not_early(queue, key, sent, copy, message_id, now_ms)
        if copy.acked:
            raise Violated(f"{queue} delivers {key!r} again after an answered ack")
        if copy.dropped < claimed:
            raise Violated(f"{queue} delivers {key!r}, which was dropped or cancelled there")
        self._has_its_content(queue, key, sent, tail, claimed)
        gone_ms = sent.gone_ms - self._apart(queue, message_id, claimed_ms).least_ms
        if sent.gone_ms and claimed_ms >= gone_ms:
            raise Violated(f"{queue} delivers {key!r} {claimed_ms - gone_ms} ms past its retention")
        self._is_not_lost(queue, key, copy, message_id, claimed)
        for pause in self.queues[queue].pauses:
            if pause.began < claimed and self._moment < pause.answered:
                raise Violated(f"{queue} delivers {key!r} while it is paused")
        self._may_be_leased(queue, key, copy, message_id, token, attempt, now_ms, claimed)
        if copy.leases:
            self.redelivered += 1
        given = self.now()
        lease = _Lease(token, deadline_ms, attempt, min(claimed, given), given, now_ms)
        copy.leases.append(lease)

    def _is_not_early(
        self, queue: str, key: bytes, sent: _Sent, copy: _Copy, message_id: int, now_ms: int
    ) -> None:
        """Its times have come by the clocks of the brokers that may have had it since."""
        source = self.queues[queue].fed_from
        if source:
            # What is redriven is available at once: its time had come where it failed.
            apart = self._apart(source, next(iter(sent.ids), 0), sent.began_ms)
        else:
            apart = self._apart(queue, message_id, sent.began_ms)
        earliest_ms = sent.visible_at_ms - apart.most_ms
        if copy.not_before_ms:
            most_ms = self._apart(queue, message_id, copy.nacked_ms).most_ms
            by_nack_ms = copy.not_before_ms + copy.nacked_by.least_ms - most_ms
            earliest_ms = max(earliest_ms, by_nack_ms)
        if now_ms < earliest_ms:
            raise Violated(f"{queue} delivers {key!r} {earliest_ms - now_ms} ms before its time")

    def _apart(self, queue: str, message_id: int, since_ms: int) -> Apart:
        return self.apart(queue, self._partition_of(queue, message_id), since_ms)

    def _partition_of(self, queue: str, message_id: int) -> int | None:
        """The partition of a message; None: its ID is not known."""
        count = self.queues[queue].partitions_count
        return partition_of(message_id, None, count) if message_id else None

    def _has_its_content(
        self, queue: str, key: bytes, sent: _Sent, tail: bytes, claimed: int
    ) -> None:
        """It is as an edit made it that a claim may see: not as one before the last answered."""
        first = 0
        for place, one in enumerate(sent.contents):
            # What was redriven into another queue is a copy, which later edits do not reach.
            if one.answered < claimed and not self.queues[queue].fed_from:
                first = place
        if all(one.tail != tail for one in sent.contents[first:]):
            places = [place for place, one in enumerate(sent.contents) if one.tail == tail]
            raise Violated(
                f"{queue} delivers {key!r} with another content than after edit {first}: {places}"
            )

    def _may_be_there(self, queue: str, key: bytes, sent: _Sent, message_id: int) -> None:
        if sent.is_refused:
            raise Violated(f"{queue} delivers {key!r}, which was refused")
        known = self.queues[queue]
        if known.fed_from:
            # Dead letters are redriven by their broker, which says nothing of single ones.
            is_redriven = self.queues[known.fed_from].attempts_max > 0
            if key not in known.moves_in and not is_redriven:
                raise Violated(f"{queue} delivers {key!r}, which nobody moved there")
            self._finishes((known.fed_from, key), f"its move to {queue}")
            copy = self.copies.setdefault((queue, key), _Copy())
            copy.ids.add(message_id)
            if len(copy.ids) > 1:
                raise Violated(f"{queue} has {key!r} twice, as {copy.ids}")
            if is_redriven:
                for one in sent.ids:
                    self.events_of_messages["message.redriven", queue, one] = None
            return
        self._same_message(key, message_id)
        if sent.only:
            if queue != sent.only:
                raise Violated(f"{queue} delivers {key!r}, which was pushed to {sent.only}")
        elif not any(one.takes(sent.headers) for one in self._filters(queue, sent)):
            raise Violated(f"{queue} delivers {key!r}, which its filter does not take")
        if sent.source is not None:
            self._finishes(sent.source, key.decode())

    def _finishes(self, source: tuple[str, bytes], what: str) -> None:
        """What was done together with the end of a message is seen: the message has ended."""
        copy = self.copies.setdefault(source, _Copy())
        if copy.finished_by not in ("", what):
            raise Violated(f"{source} was finished by both {copy.finished_by} and {what}")
        copy.finished_by = what
        copy.acked = True

    def _is_not_lost(
        self, queue: str, key: bytes, copy: _Copy, message_id: int, claimed: int
    ) -> None:
        """What a client had from the queue, or saw in it, before a purge does not come after it."""
        for loss in self.queues[queue].losses:
            was_there = message_id in loss.listed or any(
                one.given < loss.began for one in copy.leases
            )
            if loss.answered < claimed and was_there:
                raise Violated(f"{queue} delivers {key!r}, which was purged or deleted with it")

    def _may_be_leased(
        self,
        queue: str,
        key: bytes,
        copy: _Copy,
        message_id: int,
        token: str,
        attempt: int,
        now_ms: int,
        claimed: int,
    ) -> None:
        attempts_max = self.queues[queue].attempts_max
        if attempts_max and attempt > attempts_max:
            raise Violated(f"{queue} delivers {key!r} as attempt {attempt} of {attempts_max}")
        for lease in copy.leases:
            if lease.token == token:
                raise Violated(f"{queue} gives one lease of {key!r} twice")
            ahead_ms = self._apart(queue, message_id, lease.given_ms).most_ms
            # Either of the two may be the older one, and the answer that was longer on its way.
            since = min(claimed, lease.claimed)
            is_over = self._has_moved_since(queue, message_id, since)
            if attempt == lease.attempt and is_over:
                continue
            if not (lease.is_ended or is_over) and now_ms < lease.deadline_ms - ahead_ms:
                raise Violated(
                    f"{queue} leases {key!r} again {lease.deadline_ms - now_ms} ms before the "
                    f"end of attempt {lease.attempt}"
                )
            if attempt <= lease.attempt and not self._counts_again(queue, since):
                raise Violated(
                    f"{queue} delivers {key!r} as attempt {attempt} after attempt {lease.attempt}"
                )

    def _has_moved_since(self, queue: str, message_id: int, since: int) -> bool:
        """Whether the message's part of the queue may have gone to another broker since."""
        partition = self._partition_of(queue, message_id)
        return any(
            one.answered > since and one.partition in (None, partition)
            for one in self.queues[queue].relocations
        )

    def _counts_again(self, queue: str, since: int) -> bool:
        """Whether attempts may have begun at 1 again since: it was redriven, or lost."""
        known = self.queues[queue]
        return any(one.answered > since for one in (*known.redrives, *known.losses))

    def ending(
        self, queue: str, key: bytes, token: str, *, is_ack: bool, not_before_ms: int = 0
    ) -> None:
        """A client is about to ack or nack: from now on the lease may have ended."""
        copy = self.copies[queue, key]
        if is_ack:
            copy.maybe_acked_by.add(token)
        for lease in copy.leases:
            if lease.token == token:
                lease.is_ended = True

    def nacked(
        self, queue: str, key: bytes, token: str, nacked_ms: int, not_before_ms: int
    ) -> None:
        """A nack, begun at `nacked_ms`, was answered: the message comes again, not before then."""
        copy = self.copies[queue, key]
        if copy.leases[-1].token == token:
            copy.nacked_ms, copy.not_before_ms = nacked_ms, not_before_ms
            copy.nacked_by = self._apart(queue, next(iter(self.sent[key].ids), 0), nacked_ms)

    def extended(self, queue: str, key: bytes, token: str, deadline_ms: int) -> None:
        for lease in self.copies[queue, key].leases:
            if lease.token == token:
                lease.deadline_ms = deadline_ms

    def ack_refused(self, queue: str, key: bytes, token: str) -> None:
        """The lease had ended before the ack came, so that did not end the message."""
        self.copies[queue, key].maybe_acked_by.discard(token)

    def acked_by(self, queue: str, key: bytes) -> None:
        """An ack was answered: the message never comes again."""
        copy = self.copies[queue, key]
        copy.acked = True
        self.acked += 1

    # --- Commands -----------------------------------------------------------

    def executing(
        self, queue: str, key: bytes, token: str, pushed: bytes, into: str, now_ms: int
    ) -> None:
        """Commands are about to end a message and to push another, both or none."""
        # It has ended when its push is seen, or the answer says so; until then it may come again.
        self.ending(queue, key, token, is_ack=False)
        source = queue, key
        self.sent[pushed] = _Sent({}, 0, self.now(), now_ms, only=into, source=source)

    def executed(self, pushed: bytes) -> None:
        sent = self.sent[pushed]
        assert sent.source is not None, "pushed by commands"
        sent.answered = True
        self._finishes(sent.source, pushed.decode())

    def refused(self, pushed: bytes) -> None:
        """The commands were refused, so nothing of them may have happened."""
        sent = self.sent[pushed]
        if sent.ids:
            raise Violated(f"{pushed!r} was delivered, and its commands were refused")
        sent.is_refused = True

    def moving(self, key: bytes, into: str) -> None:
        """A message may move to a queue from now on."""
        self.queues[into].moves_in.setdefault(key, False)

    def moved(self, key: bytes, into: str) -> None:
        """A message has moved to a queue."""
        queue = self.queues[into]
        queue.moves_in[key] = True
        self._finishes((queue.fed_from, key), f"its move to {into}")

    def dropping(self, queue: str, key: bytes) -> None:
        """An entry is about to be cancelled or dropped: it may not come any more."""
        self.copies.setdefault((queue, key), _Copy()).maybe_dropped = True

    def dropped(self, queue: str, key: bytes, message_id: int) -> None:
        """A dead letter is gone."""
        self.copies[queue, key].acked = True
        self.events_of_messages["message.dead_lettered", queue, message_id] = None

    def cancelled(self, queue: str, key: bytes, message_id: int) -> None:
        """An entry that waited is gone; an earlier claim of it may still be on its way."""
        self.copies[queue, key].dropped = self.now()
        self.events_of_messages["message.cancelled", queue, message_id] = None

    # --- The end ------------------------------------------------------------

    def missing(self) -> list[tuple[str, bytes]]:
        """Answered publishes that a queue should have, and that no client tried to ack there."""
        return [
            (name, key)
            for name, queue in self.queues.items()
            for key, sent in self.sent.items()
            if self._must_be_there(name, queue, key, sent)
            and not ((copy := self.copies.get((name, key))) and copy.maybe_ended)
            and not self._has_moved(name, key)
        ]

    def _has_moved(self, name: str, key: bytes) -> bool:
        """Whether a client tried to ack it in the queue that it may have moved to."""
        return any(
            queue.fed_from == name and (copy := self.copies.get((into, key))) and copy.maybe_ended
            for into, queue in self.queues.items()
        )

    def _must_be_there(self, name: str, queue: _Queue, key: bytes, sent: _Sent) -> bool:
        if queue.fed_from:
            return queue.moves_in.get(key, False)
        if (
            not sent.answered
            or sent.retention_ms
            or any(loss.answered > sent.began for loss in queue.losses)
        ):
            return False
        if sent.only:
            return sent.only == name
        if queue.made.answered > sent.began and not queue.is_replayed:
            return False
        if queue.is_replayed and (
            queue.made.answered == NEVER or sent.began_ms < queue.since_ms + self.slack_ms
        ):
            return False
        return all(one.takes(sent.headers) for one in self._filters(name, sent))

    def _filters(self, queue: str, sent: _Sent) -> list[_Filter]:
        """Those by which the queue may judge a message: from the last one answered before it."""
        filters = self.queues[queue].filters
        first = 0
        for place, one in enumerate(filters):
            if one.answered < sent.began:
                first = place
        return filters[first:]

    def _same_message(self, key: bytes, message_id: int) -> None:
        """A payload that was published once is one message in all queues."""
        known = self.sent[key].ids
        known.add(message_id)
        if len(known) > 1:
            raise Violated(f"{key!r} was published once, and is {len(known)} messages: {known}")
