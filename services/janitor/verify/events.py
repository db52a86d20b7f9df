"""Events that wait to be published: numbered without a gap up to their counter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from libs.storage.records.event_records import EventCounterRecord, EventsRecord
from services.janitor.verify.findings import Kind
from services.janitor.verify.walk import Walk, shown
from slatemq._counts import counted


@dataclass
class EventNumbers:
    """Takes the rows of events in order."""

    walk: Walk
    counter: EventCounterRecord | None = None
    _next: int = field(default=0, init=False)

    def take(self, number: int, events: EventsRecord, key: bytes) -> None:
        try:
            count = len(json.loads(events.encoded))
        except (ValueError, TypeError) as error:
            self._add(shown(key), f"its JSON cannot be read: {error}", Kind.ROW)
            count = events.events_count
        if count != events.events_count:
            wrong = f"it has {counted(count, 'event')}, and {events.events_count} by its head"
            self._add(shown(key), wrong, Kind.ROW)
        if self._next and number != self._next:
            self._add(shown(key), f"the event before it has the number {self._next - 1}")
        self._next = number + events.events_count

    def check(self) -> None:
        """Compare the last event with the counter, once all rows were taken."""
        if not self._next:
            return
        last = 0 if self.counter is None else self.counter.last_number
        if last != self._next - 1:
            wrong = f"it says {last}, and the newest event that waits has {self._next - 1}"
            self.walk.findings.add(Kind.COUNT, self.walk.name, "event counter", "", wrong)

    def _add(self, key: str, wrong: str, kind: Kind = Kind.ORDER) -> None:
        self.walk.findings.add(kind, self.walk.name, "events", key, wrong)
