"""The outcome of a write task, which makes it apply once.

    task 0x57, applied   | 01 | at i64 | first message ID u64 | messages u32 | received at i64 |
                         | duplicates: Array<(place u32, message ID u64)> |
                         | digest of its request ID, 16 bytes, where it has one |
    task 0x57, failed    | 02 | at i64 | attempts u32 | error Utf8 |
    task 0x57, waiting   | 03 | at i64 | has failed u8 (0, 1) |
    task 0x57, retried   | 04 | as applied |
    task request 0x5F    | task, 16 bytes | fingerprint, 16 bytes |

Little-endian; times in milliseconds since 1970, UTC. The record of an applied task is in the batch
of its messages; their IDs are consecutive from the first one on, except those of duplicates. A
failed task is among the dead letters of the backend, or was moved back, and may be applied later.
A waiting one belongs to an acknowledged publish whose body is an object; one that has failed was
moved back from the dead letters, which writes no record any more. A retried one was applied after
it had failed: a dead letter of it may be left.

A task request, by the digest of a request ID, names the task with that ID that was applied last,
and is written and removed with its record, not with that of an earlier one: the request IDs of all
publishes are known for minutes, and a task may wait for days.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from libs.storage.layout.own_keys import REQUEST_DIGEST_BYTES, ULID_BYTES
from libs.storage.layout.primitives import Fixed, Reader, utf8
from libs.storage.records.states import FINGERPRINT_BYTES

_APPLIED: Final = 1
_FAILED: Final = 2
_WAITING: Final = 3
_RETRIED: Final = 4

_HEAD = Fixed(kind="B", at_ms="q")
_MESSAGES = Fixed(first_message_id="Q", message_count="I", received_at_ms="q")
_DUPLICATE = Fixed(place="I", message_id="Q")
_HAS_FAILED = Fixed(has_failed="B")
_ATTEMPTS = Fixed(attempts="I")


class AppliedTask(NamedTuple):
    """A task that is applied.

    Attributes:
        at_ms: When it was applied.
        first_message_id: The ID of the first stored message.
        message_count: How many messages were published.
        received_at_ms: Their time of receipt; 0 if none was stored.
        duplicates: Places of messages that were not stored, and the IDs they got.
        has_failed: Whether it has been a dead letter.
        request: The digest of its request ID; empty where it has none.
    """

    at_ms: int
    first_message_id: int
    message_count: int
    received_at_ms: int
    duplicates: tuple[tuple[int, int], ...] = ()
    has_failed: bool = False
    request: bytes = b""


class TaskRequestRecord(NamedTuple):
    """Which task of a request ID was applied last: its ULID, and its content's fingerprint."""

    ulid: bytes
    fingerprint: bytes


class FailedTaskRecord(NamedTuple):
    """A task that has failed for the last time, until it is applied after all."""

    at_ms: int
    attempts: int
    error: str


class WaitingTask(NamedTuple):
    """A task that the backend has, so that it does not count as lost."""

    at_ms: int
    has_failed: bool


TaskRecord = AppliedTask | FailedTaskRecord | WaitingTask


def encode_task_record(task: TaskRecord) -> bytes:
    if isinstance(task, WaitingTask):
        return _HEAD.pack(_WAITING, task.at_ms) + _HAS_FAILED.pack(task.has_failed)
    if isinstance(task, FailedTaskRecord):
        head = _HEAD.pack(_FAILED, task.at_ms)
        return head + _ATTEMPTS.pack(task.attempts) + utf8("error", task.error)
    return b"".join(
        (
            _HEAD.pack(_RETRIED if task.has_failed else _APPLIED, task.at_ms),
            _MESSAGES.pack(task.first_message_id, task.message_count, task.received_at_ms),
            _DUPLICATE.pack_array("duplicates", task.duplicates),
            task.request,
        )
    )


def decode_task_record(data: bytes) -> TaskRecord:
    reader = Reader("task", data)
    kind, at_ms = reader.fixed("head", _HEAD)
    task: TaskRecord
    if kind == _WAITING:
        (has_failed,) = reader.fixed("has failed", _HAS_FAILED)
        if has_failed > 1:
            raise reader.corrupt(f"has failed = {has_failed} is neither 0 nor 1")
        task = WaitingTask(at_ms, bool(has_failed))
    elif kind == _FAILED:
        (attempts,) = reader.fixed("attempts", _ATTEMPTS)
        task = FailedTaskRecord(at_ms, attempts, reader.utf8("error"))
    elif kind in (_APPLIED, _RETRIED):
        first_id, message_count, received_at_ms = reader.fixed("messages", _MESSAGES)
        duplicates = tuple(
            (place, found) for place, found in reader.array("duplicates", _DUPLICATE)
        )
        request = b"" if reader.at_end else reader.take("request", REQUEST_DIGEST_BYTES)
        task = AppliedTask(
            at_ms, first_id, message_count, received_at_ms, duplicates, kind == _RETRIED, request
        )
    else:
        raise reader.corrupt(f"unknown kind {kind} of a task")
    reader.finish()
    return task


def encode_task_request(request: TaskRequestRecord) -> bytes:
    return request.ulid + request.fingerprint


def decode_task_request(data: bytes) -> TaskRequestRecord:
    reader = Reader("task request", data)
    ulid = reader.take("ULID", ULID_BYTES)
    request = TaskRequestRecord(ulid, reader.take("fingerprint", FINGERPRINT_BYTES))
    reader.finish()
    return request
