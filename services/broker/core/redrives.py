"""Redrives: which dead letters move where, and how far each is. Pure, like the queue machine.

    start ──► running ──step──► … ──► done
                │  ▲  └── its target is gone ──► failed
         cancel │  │ resume                         │
                ▼  └────────────────────────────────┘
             cancelled

A step looks at some messages of one row of the failed list. The commit that takes messages out of
the row puts them into the target, and moves the redrive on: each is moved once, despite crashes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple, TypeGuard

from libs.storage.layout.own_keys import redrive_key
from libs.storage.layout.primitives import RowChange
from libs.storage.records.queues import AvailableMessage, DoneMessage, FailedMessage
from libs.storage.records.redrive_records import RedriveRecord, RedriveState, encode_redrive
from services.broker.core.lists.storable import storable
from services.broker.core.queue import Queue
from slatemq.errors import ResourceExhausted

RUNNING_MAX = 100
"""Redrives that may run at the same time on a shard."""

PRINCIPAL_RUNNING_MAX = 25
"""Of these, those that one principal started or resumed, where there is a policy."""

KEPT = 1000
"""Ended redrives that are still listed, unless set otherwise."""

RETENTION_S = 30 * 24 * 60 * 60
"""How long they are listed, unless set otherwise."""


class Redrives:
    """The redrives of one shard, by number; a higher number is newer."""

    def __init__(self, stored: Mapping[int, RedriveRecord] | None = None) -> None:
        self.kept = KEPT
        self.retention_s = RETENTION_S
        self._records = dict(sorted((stored or {}).items()))
        self._changed: dict[int, bytes | None] = {}  # by number, the record; None: to delete
        self._next = max(self._records, default=0) + 1

    def __iter__(self) -> Iterator[tuple[int, RedriveRecord]]:
        return iter(list(self._records.items()))

    def get(self, number: int) -> RedriveRecord | None:
        return self._records.get(number)

    def of_request(self, request_id: str) -> int | None:
        """The redrive that a request started."""
        for number, record in self._records.items():
            if request_id and record.request_id == request_id:
                return number
        return None

    def running(self) -> list[int]:
        return [n for n, one in self._records.items() if one.state == RedriveState.RUNNING]

    def check_capacity(self, principal: str) -> None:
        """Raises ResourceExhausted while too many run, or too many of a principal's."""
        running = self.running()
        if len(running) >= RUNNING_MAX:
            raise _too_many(f"{RUNNING_MAX} running redrives")
        own_count = sum(self._records[number].principal == principal for number in running)
        if principal and own_count >= PRINCIPAL_RUNNING_MAX:
            raise _too_many(f"{PRINCIPAL_RUNNING_MAX} running redrives of {principal!r}")

    def start(self, record: RedriveRecord) -> int:
        """Adds one; returns its number."""
        number = self._next
        self.put(number, record)
        self._next = number + 1
        return number

    def put(self, number: int, record: RedriveRecord) -> None:
        """Changes one. Of the ended ones beyond `kept`, the first to end are forgotten."""
        if record.state == RedriveState.DONE:
            record = record._replace(message_ids=())  # up to 80 kB, of no use any more
        value = storable(f"redrive {number}", encode_redrive, record)
        self._records[number] = record
        self._changed[number] = value
        if record.state != RedriveState.RUNNING:
            self._drop(self._ended(number)[: -self.kept])

    def forget(self, now_ms: int) -> None:
        """Forgets those that ended more than `retention_s` ago (0: none), or beyond `kept`."""
        ended = self._ended()
        kept_ms = now_ms - self.retention_s * 1000 if self.retention_s else 0
        over = [n for n in ended if self._records[n].ended_at_ms < kept_ms]
        self._drop({*over, *ended[: -self.kept]})

    def _ended(self, last: int = 0) -> list[int]:
        """The ended ones, in the order of their ends; `last` counts as the last."""
        ended = [n for n, one in self._records.items() if one.state != RedriveState.RUNNING]
        return sorted(ended, key=lambda n: (n == last, self._records[n].ended_at_ms))

    def _drop(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number + 1 < self._next:  # the newest stays: after a restart its number is needed
                del self._records[number]
                self._changed[number] = None

    def note_removed(self, queue_id: str, places: Mapping[int, Set[int]], by: int = 0) -> None:
        """Notes which places of which rows of a queue were emptied, `by` a redrive or not (0).

        Other redrives that stand within these rows keep their position among what is left.
        """
        for other, record in self:
            taken = places.get(record.next_order)
            if other == by or not taken or record.queue_id != queue_id:
                continue
            before = sum(place < record.next_place for place in taken)
            if before and record.state != RedriveState.DONE:
                self.put(other, record._replace(next_place=record.next_place - before))

    @property
    def has_changes(self) -> bool:
        return bool(self._changed)

    def drain(self) -> Iterator[RowChange]:
        changed, self._changed = self._changed, {}
        for number, value in changed.items():
            yield redrive_key(number), value


def _too_many(limit: str) -> ResourceExhausted:
    return ResourceExhausted(
        f"the limit of {limit} is reached; wait for one to end",
        reason="TOO_MANY_REDRIVES",
        retry_after_ms=1000,
    )


class RedriveStep(NamedTuple):
    """What a redrive decided about messages of a row.

    `messages` are all of the row `order`, as it is stored. Those before `through` were examined;
    those at the places `chosen` are to move.
    """

    order: int
    messages: Sequence[FailedMessage]
    through: int
    chosen: Sequence[int]


Enter = Callable[[AvailableMessage], bool]
"""Adds a message to the target; False: the target does not take it."""


def is_its_queue(queue: Queue | None, record: RedriveRecord) -> TypeGuard[Queue]:
    """Whether this is the queue that the redrive was started on."""
    return queue is not None and queue.created_revision == record.queue_revision


def moved(
    queue: Queue, record: RedriveRecord, step: RedriveStep, enter: Enter, now_ms: int
) -> tuple[RedriveRecord, set[int], list[RowChange]]:
    """Applies a step; returns the redrive after it, the places removed, and the rows to write.

    A message past its retention stays where it is. One that goes into another queue is done here,
    marked as transferred.
    """
    taken: set[int] = set()
    for place in step.chosen:
        message = step.messages[place]
        item = AvailableMessage(
            message.message_id, message.priority, 0, message.retention_deadline_ms, 0
        )
        if not queue.waiting.is_over(item, now_ms) and enter(item):
            taken.add(place)
    left = [one for place, one in enumerate(step.messages) if place not in taken]
    rows: list[RowChange] = []
    if taken:
        rows.append(queue.failed.rewrite(step.order, left, len(taken)))
        if record.target_queue_id != queue.queue_id:
            gone = [step.messages[place] for place in sorted(taken)]
            into = record.target_queue_id
            queue.done.add(
                DoneMessage(one.message_id, now_ms, one.attempts, transferred_to=into)
                for one in gone
            )
    whole = step.through >= len(step.messages)
    record = record._replace(
        next_order=step.order + 1 if whole else step.order,
        next_place=0 if whole else step.through - len(taken),
        examined_count=record.examined_count + step.through - record.next_place,
        redriven_count=record.redriven_count + len(taken),
    )
    return record, taken, rows
