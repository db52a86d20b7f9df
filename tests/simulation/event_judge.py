"""What a backend of event queues must never see, and what it must have in the end.

The rules are those of the documentation: an event has one ID for ever, events of one process come
in the order of its commits when they come for the first time, each change has its event, and in
`fire-and-forget` none comes twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from slatemq.events.envelope import Event
from tests.simulation.judge import Judge, Violated

PUBLISHED: Final = "message.published"
OF_MESSAGES: Final = tuple(
    f"message.{what}" for what in ("dead_lettered", "redriven", "edited", "cancelled")
)


class Change(NamedTuple):
    """What a change of a queue is known by."""

    type: str
    queue: str


class EventJudge:
    """Judges each event when it lands.

    Attributes:
        by_id: The events, in the order in which they came for the first time.
        repeated: Events that came again.
    """

    def __init__(self, judge: Judge, *, keeps: bool) -> None:
        """`keeps`: no event may be missing, not in `fire-and-forget`."""
        self.by_id: dict[str, Event] = {}
        self.repeated = 0
        self._judge = judge
        self._keeps = keeps
        self._published: dict[int, Event] = {}
        self._changes: Counter[Change] = Counter()
        self._of_messages: set[tuple[str, str, int]] = set()
        self._last_message: dict[str, int] = {}
        self._revisions: dict[str, int] = {}

    def landed(self, event: Event) -> None:
        """The backend has it."""
        known = self.by_id.get(event.id)
        if known is not None:
            self.repeated += 1
            if event != known and not self._is_edited(event, known):
                raise Violated(f"the event {event.id} comes again as another: {event} {known}")
            if not self._keeps:
                raise Violated(f"the event {event.id} comes twice in fire-and-forget")
            return
        self.by_id[event.id] = event
        if event.type == PUBLISHED:
            self._take_message(event)
        elif event.type in OF_MESSAGES:
            data = event.data
            into = data.get("target", data["queue"])
            self._of_messages.add((event.type, into, data["message_id"]))
        elif event.type.startswith("queue."):
            self._take_change(event)

    def _is_edited(self, event: Event, known: Event) -> bool:
        """Whether the one that comes again has what an edit has made of its message since."""
        if event.type != PUBLISHED:
            return False
        as_before = {**event.data, "size": known.data["size"]}
        message_id = event.data["message_id"]
        return replace(event, data=as_before) == known and any(
            message_id in sent.ids and len(sent.contents) > 1 for sent in self._judge.sent.values()
        )

    def _take_message(self, event: Event) -> None:
        message_id = event.data["message_id"]
        if message_id in self._published:
            first = self._published[message_id].id
            raise Violated(f"the message {message_id} has two events: {first} and {event.id}")
        last = self._last_message.get(event.source, 0)
        # In fire-and-forget an owner that stood still may send its last ones after its successor's.
        if message_id < last and self._keeps:
            raise Violated(
                f"the event of {message_id} comes after that of {last} of {event.source}"
            )
        self._last_message[event.source] = max(message_id, last)
        self._published[message_id] = event

    def _take_change(self, event: Event) -> None:
        queue = event.data["queue"]
        self._changes[Change(event.type, queue)] += 1
        revision = event.data.get("revision")
        if event.type == "queue.created":
            self._revisions[queue] = event.data["revision"]
        elif revision is not None:
            last = self._revisions.get(queue, 0)
            if revision <= last:
                raise Violated(f"revision {revision} of {queue} comes after revision {last}")
            self._revisions[queue] = revision

    def landed_up_to(self, shard: int) -> int:
        """The last message of an ingest shard of which an event has come."""
        return self._last_message.get(f"ingest-{shard}", 0)

    # --- The end ------------------------------------------------------------

    def missing(self) -> list[str]:
        """What should have an event by now, and has none. Raises Violated for a wrong one."""
        self._check_messages()
        if not self._keeps:
            return []
        return [*self._without_event(), *self._changes_without_event()]

    def _without_event(self) -> Iterator[str]:
        for key, sent in self._judge.sent.items():
            if not any(one in self._published for one in sent.ids) and sent.ids:
                yield f"no event of {key!r}, the message {sent.ids}"
        for wanted in self._judge.events_of_messages:
            if wanted not in self._of_messages:
                yield f"no event {wanted}"

    def _changes_without_event(self) -> Iterator[str]:
        for (kind, queue), (least, most) in self._judge.changes.items():
            found = self._changes[Change(kind, queue)]
            if found > most:
                raise Violated(f"{found} events {kind} of {queue}, and {most} were asked for")
            if found < least:
                yield f"{found} events {kind} of {queue}, and {least} were answered"

    def _check_messages(self) -> None:
        ids = {one: key for key, sent in self._judge.sent.items() for one in sent.ids}
        for message_id, event in self._published.items():
            key = ids.get(message_id)
            if key is None:
                continue  # Of a publish that was not answered, and in no queue that was consumed.
            found: dict[str, Any] = event.data
            sent = self._judge.sent[key]
            # An edit that comes before its event is in it.
            sizes = [len(key) + len(one.tail) for one in sent.contents]
            if found["headers"] != sent.headers or found["size"] not in sizes:
                wanted = f"{sent.headers}, {sizes} bytes"
                raise Violated(
                    f"the event of {key!r} has {found}, and it was published as {wanted}"
                )
