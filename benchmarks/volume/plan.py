"""Which messages a generated instance has, and what became of each.

The messages have the IDs from 1 on, in the order in which they came: `entry` of them with each
commit, evenly over the last `days`. Each went to one queue, in turn. What became of them stands in
the order of State, the oldest first, or scattered over the whole log.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from libs.storage.layout.ids import message_id
from services.ingest.batches import ENTRY_MESSAGES_MAX

DAY_MS = 24 * 3_600_000
HOUR_MS = 3_600_000

FOR_LONG_S = 30 * 24 * 3600
"""Retention of most messages."""

NOT_LONG_S = 3600
"""Retention of those that are past it."""

NEWEST_MS = 2 * HOUR_MS
"""How long ago the newest message came: so what is to be past its retention is."""

LONGEST_DAYS = 29
"""From here on messages would be past their retention that are not meant to be."""


class State(IntEnum):
    """What became of a message."""

    CLEANED = 0  # it came, and the janitor has removed all of it
    DONE = 1
    FAILED = 2
    EXPIRED = 3  # it still waits, past its retention
    IN_FLIGHT = 4
    DELAYED = 5
    WAITING = 6


@dataclass(frozen=True, slots=True)
class Volume:
    """How many messages of each kind, and of which form."""

    cleaned: int = 0
    done: int = 0
    failed: int = 0
    expired: int = 0
    in_flight: int = 0
    delayed: int = 0
    waiting: int = 0
    queues: int = 1
    queue: str = "volume"
    """The name of the queue; of several, what they begin with."""
    payload_bytes: int = 100
    entry: int = 1000
    """Messages of one commit: they share a log entry, and a row in the lists of their queue."""
    days: float = 14
    done_retention_s: int = 0
    """Of all queues; 0 keeps what is done for ever."""
    delayed_hours: float = 10
    """Delayed messages fall due within this many hours, starting an hour from now."""
    scattered: bool = False

    def counts(self) -> dict[State, int]:
        """How many messages of each state."""
        return {state: getattr(self, state.name.lower()) for state in State}

    @property
    def messages(self) -> int:
        """All that ever came."""
        return sum(self.counts().values())

    @property
    def stored(self) -> int:
        """Those that are in the log."""
        return self.messages - self.cleaned

    def queue_ids(self) -> list[str]:
        """The names of the queues."""
        if self.queues == 1:
            return [self.queue]
        return [f"{self.queue}-{number}" for number in range(self.queues)]

    def check(self) -> None:
        """Raises ValueError for what cannot be made."""
        if min(self.counts().values()) < 0 or self.stored < 1:
            raise ValueError("at least one message must be there")
        if self.queues < 1 or not 1 <= self.entry <= ENTRY_MESSAGES_MAX:
            raise ValueError("queues must be at least 1, and entry within 1..1,024")
        if not 1 <= self.days <= LONGEST_DAYS or self.delayed_hours <= 0:
            raise ValueError(f"days must be within 1..{LONGEST_DAYS}, delayed_hours above 0")


@dataclass(frozen=True)
class Layout:
    """The messages of a volume by their numbers from 0 on, and when they came.

    The cleaned ones are the first; arrays are of the others.
    """

    volume: Volume
    now_ms: int = field(default_factory=lambda: int(time.time() * 1000))

    def states(self) -> Any:
        """What became of each stored message."""
        counts = self.volume.counts()
        kept = [state for state in State if state is not State.CLEANED]
        states = np.repeat(np.array(kept, np.uint8), [counts[state] for state in kept])
        return np.random.default_rng(0).permutation(states) if self.volume.scattered else states

    @property
    def commits(self) -> int:
        """In how many commits they came."""
        return -(-self.volume.stored // self.volume.entry)

    @property
    def last_message(self) -> int:
        """The ID of the newest message: a cursor that has routed all of the log."""
        return self.id_of(self.volume.stored - 1)

    def id_of(self, place: int) -> int:
        """The ID of a stored message, the first of which has the place 0."""
        return message_id(0, 1 + self.volume.cleaned + place)

    def received_ms(self, commit: int) -> int:
        """When the messages of a commit came."""
        span_ms = int(self.volume.days * DAY_MS) - NEWEST_MS
        begin_ms = self.now_ms - int(self.volume.days * DAY_MS)
        return begin_ms + span_ms * (commit + 1) // self.commits


def retention_s(state: int) -> int:
    """The retention of a message of this state."""
    return NOT_LONG_S if state == State.EXPIRED else FOR_LONG_S
