"""Write tasks: a write that was accepted, on its way to the store.

::

    {"task_id": "task_01KJ2G5Q00...", "operation": "Publish",
     "created_at": "2026-02-22T12:00:00.000Z", "attempts": 0, "max_retries": 3, "payload": {...}}

A task may be delivered more than once, always with the same ID, by which it is applied once.
`attempts` counts the attempts that failed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Generic, TypeVar

import msgspec

from slatemq.errors import InvalidArgument
from slatemq.events.envelope import (
    LAST_DATE_MS,
    decode_struct,
    encode_struct,
    format_timestamp,
    parse_timestamp,
)
from slatemq.models import now_ms

log = logging.getLogger(__name__)

D = TypeVar("D")

Moving = Callable[[Collection[str]], AbstractContextManager[object]]
"""What a backend enters while it moves the dead letters of tasks with these IDs back; it leaves it
with an error where they may not have moved."""

_TASK_ID: Final = re.compile("task_[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}")

COUNT_MAX: Final = 1_000_000_000
"""Of attempts and retries, which have 32 bits in records and answers; settings allow 1,000."""

ERROR_BYTES_MAX: Final = 4_096
"""Of an error as it is stored. RabbitMQ takes 128 KiB of headers, Kafka 1 MiB per record."""

SHORT_ERROR_BYTES_MAX: Final = 256
"""Of an error with which its dead letter would be too large: what enqueues leaves room for it."""

MOVED_MAX: Final = 32
"""Dead letters that move back together: a round trip for each would take minutes for thousands.
Each may have a body of 512 KiB."""

TIME_DIGITS_MAX: Final = 15
"""Of a time in ms that a message says: the year 33658, and no number that is slow to read."""


class WriteTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A write to apply.

    Attributes:
        task_id: `task_` and a ULID.
        operation: The call to apply, such as `Publish`.
        created_at: When it was accepted: ISO 8601, UTC, with milliseconds.
        attempts: How many attempts have failed.
        max_retries: How many failed attempts are tried again.
        payload: The call's arguments, as JSON values; a large body is not in it but in the object
            that `data_ref` names.
    """

    task_id: str
    operation: str
    created_at: str
    attempts: int = 0
    max_retries: int = 3
    payload: dict[str, Any]

    def __post_init__(self) -> None:
        """Raise InvalidArgument for an ID, a time or a count of another form."""
        if not _TASK_ID.fullmatch(self.task_id):
            raise InvalidArgument("task_id", f"must be task_ and a ULID, not {self.task_id!r}")
        parse_timestamp("created_at", self.created_at)
        if not self.operation:
            raise InvalidArgument("operation", "must not be empty")
        for name, count in (("attempts", self.attempts), ("max_retries", self.max_retries)):
            if not 0 <= count <= COUNT_MAX:
                raise InvalidArgument(name, f"must be 0 to {COUNT_MAX}, not {count}")

    @property
    def has_retries_left(self) -> bool:
        return self.attempts < self.max_retries

    def after_failure(self) -> WriteTask:
        return msgspec.structs.replace(self, attempts=min(self.attempts + 1, COUNT_MAX))

    def renewed(self) -> WriteTask:
        return msgspec.structs.replace(self, attempts=0)


class FailedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task in the dead-letter place of a backend, and the error of its last attempt."""

    task: WriteTask
    error: str
    failed_at: str

    def __post_init__(self) -> None:
        """Raise InvalidArgument for a time of another form."""
        parse_timestamp("failed_at", self.failed_at)

    @classmethod
    def now(cls, task: WriteTask, error: str) -> FailedTask:
        """The dead letter of a task whose last attempt has just failed."""
        at = format_timestamp(now_ms())
        return cls(task=task.after_failure(), error=cut_error(error), failed_at=at)

    @property
    def name(self) -> str:
        """One task may have several dead letters."""
        return self.task.task_id

    def without_payload(self) -> FailedTask:
        """For a list of them: thousands of bodies would not fit into memory."""
        return msgspec.structs.replace(self, task=msgspec.structs.replace(self.task, payload={}))


class UnreadableTask(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the dead-letter place that this process cannot take for a task: for an operator.

    It is not retried, unless it was encrypted with a key that this process has by then.

    Attributes:
        place: Where it is, in the words of the backend.
        error: Why it cannot be read.
        failed_at: When it was put there.
    """

    place: str
    error: str
    failed_at: str

    @property
    def name(self) -> str:
        return self.place

    def without_payload(self) -> UnreadableTask:
        return self


def encode_task(task: WriteTask) -> bytes:
    """The task as JSON, keys in the order of the class.

    Raises InvalidArgument for a payload that JSON cannot hold.
    """
    return encode_struct(task, "task")


def decode_task(encoded: bytes | str) -> WriteTask:
    """A task from its JSON. Raises InvalidArgument, which names the field."""
    return decode_struct(encoded, WriteTask, "task")


def read_task(encoded: bytes | str) -> WriteTask | str:
    """A task from its JSON; of what is not one, the error as it is stored, which is logged."""
    try:
        return decode_task(encoded)
    except InvalidArgument as error:
        why = cut_error(str(error))
        log.error("what is not a task goes to the dead letters: %s", why)
        return why


def cut_error(error: str, bytes_max: int = ERROR_BYTES_MAX) -> str:
    """An error as it is stored: it may quote a value of any length."""
    return error.encode(errors="replace")[:bytes_max].decode(errors="ignore")


def encode_failed_task(failed: FailedTask) -> bytes:
    return msgspec.json.encode(failed)


def decode_failed_task(encoded: bytes | str) -> FailedTask:
    """A dead letter from its JSON. Raises InvalidArgument, which names the field."""
    return decode_struct(encoded, FailedTask, "dead letter")


def read_dead_letter(
    encoded: bytes, properties: Mapping[str, Any], place: str
) -> FailedTask | UnreadableTask:
    """A dead letter of the kind that its properties say; a damaged task is unreadable, too."""
    kind, error = str(properties.get("kind")), str(properties.get("error", ""))
    if kind == "task":
        try:
            return decode_failed_task(encoded)
        except InvalidArgument as wrong:
            error = cut_error(str(wrong))
    return UnreadableTask(
        place=place,
        error=error or f"a dead letter of the kind {kind!r}",
        failed_at=_time_of(properties.get("failed_at")),
    )


def _time_of(stamp: object) -> str:
    """A time by a property, which another program may have set; now, where it is none."""
    try:
        parse_timestamp("failed_at", str(stamp))
    except InvalidArgument:
        return format_timestamp(now_ms())
    return str(stamp)


def read_due_ms(stamp: object) -> int:
    """When a delayed task is due, by a property of its message; 0, so now, where it has none."""
    text = stamp.decode(errors="replace") if isinstance(stamp, bytes) else str(stamp)
    is_time = len(text) <= TIME_DIGITS_MAX and text.isascii() and text.isdecimal()
    return int(text) if is_time else 0


def format_server_time(at_ms: object) -> str:
    """A time by a server, which may have taken it from a client: of no date, as 1970."""
    return format_timestamp(at_ms if isinstance(at_ms, int) and 0 <= at_ms <= LAST_DATE_MS else 0)


class TaskDeliveries(Generic[D]):
    """Deliveries by task. A task may be delivered again while it is held: each has its own end.

    Attributes:
        unreadable: What is not a task, until it is a dead letter: take it first, since a failure
            must not hide it.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[D]] = {}
        self.unreadable: D | None = None

    async def take(
        self, delivery: D, encoded: bytes, bury: Callable[[D, str], Awaitable[None]]
    ) -> WriteTask | None:
        """The task of a delivery, which is held from now on; None of what is not a task.

        `bury` makes that a dead letter with the error, and finishes it.
        """
        task = read_task(encoded)
        if isinstance(task, str):
            self.unreadable = delivery
            await bury(delivery, task)
            self.unreadable = None
            return None
        self.add(task.task_id, delivery)
        return task

    def add(self, task_id: str, delivery: D) -> None:
        self._held.setdefault(task_id, []).append(delivery)

    def of(self, task_id: str) -> Sequence[D]:
        return self._held.get(task_id, ())

    def first(self, task_id: str) -> D | None:
        """The delivery to finish next; None when none is held."""
        return next(iter(self.of(task_id)), None)

    def drop(self, task_id: str) -> None:
        """Remove the first one: the server has confirmed its end."""
        deliveries = self._held[task_id]
        del deliveries[0]
        if not deliveries:
            del self._held[task_id]

    def __iter__(self) -> Iterator[D]:
        return (delivery for deliveries in self._held.values() for delivery in deliveries)
