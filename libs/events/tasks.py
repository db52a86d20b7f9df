"""Write tasks: a write that was accepted, on its way to the store.

::

    {"task_id": "task_01KJ2G5Q00...", "operation": "Publish",
     "created_at": "2026-02-22T12:00:00.000Z", "attempts": 0, "max_retries": 3, "payload": {...}}

A task may be delivered more than once, always with the same ID, by which it is applied once.
`attempts` counts the attempts that failed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from libs.events.wall_clock import now_ms
from slatemq.errors import InvalidArgument
from slatemq.events.envelope import (
    TASK_PREFIX,
    check_id,
    decode_struct,
    format_timestamp,
    parse_timestamp,
)

ERROR_BYTES_MAX: Final = 4_096
"""Of an error as it is stored. RabbitMQ takes 128 KiB of headers, Kafka 1 MiB per record."""


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
        check_id("task_id", self.task_id, TASK_PREFIX)
        parse_timestamp("created_at", self.created_at)
        if not self.operation:
            raise InvalidArgument("operation", "must not be empty")
        if self.attempts < 0 or self.max_retries < 0:
            raise InvalidArgument(
                "attempts" if self.attempts < 0 else "max_retries", "must not be negative"
            )

    @property
    def has_retries_left(self) -> bool:
        return self.attempts < self.max_retries

    def after_failure(self) -> WriteTask:
        return msgspec.structs.replace(self, attempts=self.attempts + 1)

    def renewed(self) -> WriteTask:
        return msgspec.structs.replace(self, attempts=0)


class FailedTask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A task in the dead-letter place of a backend, and the error of its last attempt."""

    task: WriteTask
    error: str
    failed_at: str

    @classmethod
    def now(cls, task: WriteTask, error: str) -> FailedTask:
        """The dead letter of a task whose last attempt has just failed."""
        at = format_timestamp(now_ms())
        return cls(task=task.after_failure(), error=cut_error(error), failed_at=at)

    def without_payload(self) -> FailedTask:
        """For a list of them: thousands of bodies would not fit into memory."""
        return msgspec.structs.replace(self, task=msgspec.structs.replace(self.task, payload={}))


class UnreadableTask(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of the dead-letter place that is not a task: for an operator; it is not retried.

    Attributes:
        place: Where it is, in the words of the backend.
        error: Why it cannot be read.
        failed_at: When it was put there.
    """

    place: str
    error: str
    failed_at: str


def encode_task(task: WriteTask) -> bytes:
    """The task as JSON, keys in the order of the class."""
    return msgspec.json.encode(task)


def decode_task(encoded: bytes | str) -> WriteTask:
    """A task from its JSON. Raises InvalidArgument, which names the field."""
    return decode_struct(encoded, WriteTask, "task")


def cut_error(error: str) -> str:
    """An error as it is stored: it may quote a value of any length."""
    return error.encode(errors="replace")[:ERROR_BYTES_MAX].decode(errors="ignore")


def encode_failed_task(failed: FailedTask) -> bytes:
    return msgspec.json.encode(failed)


def decode_failed_task(encoded: bytes | str) -> FailedTask:
    """A dead letter from its JSON. Raises InvalidArgument, which names the field."""
    return decode_struct(encoded, FailedTask, "dead letter")


def read_dead_letter(
    kind: str, encoded: bytes, place: str, error: str, failed_at: str
) -> FailedTask | UnreadableTask:
    """A dead letter of this kind; a task that is damaged is unreadable, too."""
    if kind == "task":
        try:
            return decode_failed_task(encoded)
        except InvalidArgument as wrong:
            error = cut_error(str(wrong))
    error = error or f"a dead letter of the kind {kind!r}"
    return UnreadableTask(place=place, error=error, failed_at=failed_at)
