"""The queues that are on their way to another shard, or from one. Pure, like the shard.

    source   leaving ──the claim is the target's, and it has the queue──► arrived ──► deleted, swept
                └──the move is cancelled──► a queue again
    target   copying ──► copied ──the claim is ours──► a queue
                └──────────┴──the move is cancelled──► deleted, swept

The claim is that of the queue's name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from libs.storage.errors import CorruptRecord
from libs.storage.layout.own_keys import move_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.move_records import MoveRecord, MoveStage, encode_move
from services.broker.core.lists.storable import storable
from services.broker.core.queue import Queue
from slatemq.errors import Unavailable

LISTED_MS: Final = 10_000
"""How long a shard lists a queue that has left it: a caller may have asked the target before. As
long, it takes a caller that did not find a queue which has come for one that asked too early."""


def moving(queue_id: str) -> Unavailable:
    return Unavailable(
        f"queue {queue_id!r} is moving to another shard",
        reason="QUEUE_MOVING",
        metadata={"queue_id": queue_id},
    )


class Departure(NamedTuple):
    """A queue that is leaving, as it was when it left, and the record of that."""

    queue: Queue
    record: MoveRecord

    @property
    def has_arrived(self) -> bool:
        """Whether the target has the queue, or had it: here only its rows are left."""
        return self.record.stage is MoveStage.ARRIVED


class Left(NamedTuple):
    """A queue that has left not long ago: as it was, where it is now, and when that was known."""

    queue: Queue
    shard: int
    at_ms: int


class Moves:
    def __init__(self) -> None:
        self.departures: dict[str, Departure] = {}
        self.arrivals: dict[str, MoveRecord] = {}
        self._left: dict[str, Left] = {}
        self._noting: list[set[str]] = []
        self._arrived_ms: dict[str, int] = {}
        self._changed: dict[str, bytes | None] = {}  # by queue, the record; None: to delete

    def restore(self, queue: Queue | None, queue_id: str, record: MoveRecord) -> None:
        """Takes in a stored record; `queue` is the one that is leaving. Raises CorruptRecord."""
        if not record.is_departure:
            self.arrivals[queue_id] = record
        elif queue is None:
            # The commit that deletes its config ends the move, too.
            raise CorruptRecord("move", f"queue {queue_id!r} is leaving, and has no config")
        else:
            self.departures[queue_id] = Departure(queue, record)

    def has(self, queue_id: str) -> bool:
        """Whether the queue is on its way."""
        return self.is_leaving(queue_id) or queue_id in self.arrivals

    def is_leaving(self, queue_id: str) -> bool:
        departure = self.departures.get(queue_id)
        return departure is not None and not departure.has_arrived

    def has_record(self, queue_id: str) -> bool:
        """Whether it is on its way, or has arrived elsewhere and its rows are still here."""
        return queue_id in self.departures or queue_id in self.arrivals

    def leave(self, queue: Queue, record: MoveRecord) -> None:
        self._put(queue.queue_id, record)
        self.departures[queue.queue_id] = Departure(queue, record)

    def expect(self, queue_id: str, record: MoveRecord) -> None:
        """Notes a queue that arrives, or that more of it is there."""
        self._put(queue_id, record)
        self.arrivals[queue_id] = record

    def end(self, queue_id: str) -> None:
        """The queue is here, or will not come."""
        self.departures.pop(queue_id, None)
        self.arrivals.pop(queue_id, None)
        self._left.pop(queue_id, None)
        self._changed[queue_id] = None

    def arrived_elsewhere(self, queue_id: str, now_ms: int) -> None:
        """The target has the queue: whatever is claimed from now on is about others."""
        queue, record = self.departures[queue_id]
        self.leave(queue, record._replace(stage=MoveStage.ARRIVED))
        self._left[queue_id] = Left(queue, record.shard, now_ms)
        for left in self._noting:
            left.add(queue_id)

    def forget_departed(self, queue_id: str) -> None:
        del self.departures[queue_id]
        self._changed[queue_id] = None

    def arrive(self, queue_id: str, now_ms: int) -> None:
        """The queue is here, now or again."""
        last_ms = now_ms - LISTED_MS
        self._arrived_ms = {
            one: at_ms for one, at_ms in self._arrived_ms.items() if at_ms > last_ms
        }
        self._arrived_ms[queue_id] = now_ms

    def has_arrived(self, queue_id: str, now_ms: int) -> bool:
        """Whether the queue may not have been here a moment ago, and be here now."""
        return self.has(queue_id) or self._arrived_ms.get(queue_id, -LISTED_MS) + LISTED_MS > now_ms

    def departing(self, now_ms: int) -> Mapping[str, tuple[Queue, int]]:
        """The queues that are leaving, or left not long ago, each with the other shard."""
        self._left = {
            queue_id: one for queue_id, one in self._left.items() if one.at_ms + LISTED_MS > now_ms
        }
        left = {queue_id: (one.queue, one.shard) for queue_id, one in self._left.items()}
        leaving = {
            queue_id: (one.queue, one.record.shard)
            for queue_id, one in self.departures.items()
            if not one.has_arrived
        }
        return left | leaving

    @contextmanager
    def noting_left(self) -> Iterator[Collection[str]]:
        """The queues that leave within it, also those that leave long before its end."""
        left: set[str] = set()
        self._noting.append(left)
        try:
            yield left
        finally:
            self._noting = [one for one in self._noting if one is not left]

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def drain(self) -> list[RowChange]:
        changed, self._changed = self._changed, {}
        return [(move_key(queue_id), value) for queue_id, value in changed.items()]

    def _put(self, queue_id: str, record: MoveRecord) -> None:
        value = storable(f"move of queue {queue_id!r}", encode_move, record)
        self._changed[queue_id] = value
