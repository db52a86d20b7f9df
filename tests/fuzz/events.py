"""What backends of event queues give back, and notifications of S3 stores."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, cast

from google.protobuf.message import DecodeError

from libs.events.kafka.connection import ERROR
from libs.events.kafka.dead_letters import _dead_letter_of
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.event_stream import is_of
from libs.events.tasks import (
    FailedTask,
    UnreadableTask,
    cut_error,
    decode_failed_task,
    decode_task,
    encode_task,
    read_dead_letter,
    read_due_ms,
    read_task,
)
from services.ingest.tasks.bodies import TaskBodies
from services.ingest.tasks.queued import _known
from services.ingest.tasks.servicer import _task_of
from services.ingest.wire import Rules, accept
from slatemq.events.cloud_events import decode_cloud_event
from slatemq.events.envelope import decode_event, encode_event
from slatemq.events.messages import message_of
from slatemq.events.s3 import read_notifications
from slatemq.v1.ingest_pb2 import PublishRequest
from tests.fuzz.compare import Wrong, ended, same


def event(data: bytes) -> None:
    """What backends of event queues give back, and CloudEvents."""
    decoders = (decode_event, decode_task, decode_failed_task, decode_cloud_event)
    if not data:
        return
    decode: Callable[[bytes], Any] = decoders[data[0] % len(decoders)]
    found = decode(data[1:])
    if decode is decode_event:
        same(decode_event(encode_event(found)), found, "event")
    elif decode is decode_task:
        same(decode_task(encode_task(found)), found, "task")


def s3_notification(data: bytes) -> None:
    """A notification of an S3 store, of SNS or of EventBridge."""
    for one in read_notifications(data).events:
        if not one.type:
            raise Wrong(f"an event without a type: {one}")
        message_of(one)


_RULES: Final = Rules(payload_bytes_max=1 << 20, retention_s=3600, delay_ms_max=900_000)
_BODIES: Final = TaskBodies(cast("Any", None), 0, "backend")


def delivery(data: bytes) -> None:
    """A message of a backend, of the kind that the first byte chooses; fields end with a zero."""
    if data:
        fields = data[1:].split(b"\0", 3)
        _DELIVERIES[data[0] % len(_DELIVERIES)](*fields, *[b""] * (4 - len(fields)))


def _task(encoded: bytes, *_: bytes) -> None:
    """What the worker of an ingest does before it applies a task."""
    task = read_task(encoded)
    if isinstance(task, str):
        same(cut_error(task), task, "error")
    elif _BODIES.path_of(task.payload) is None:
        try:
            accept(PublishRequest.FromString(ended(_BODIES.get(task.payload))), _RULES)
        except DecodeError:  # which the worker names
            return


def _redis(number: bytes, kind: bytes, error: bytes, encoded: bytes) -> None:
    entry_id = b"%d-0" % int.from_bytes(number[:8], "big")
    fields = {b"kind": kind, b"error": error, b"data": encoded}
    _listed(DeadLetters(cast("Any", None), "prefix")._read(entry_id, fields))
    is_of(frozenset({"message.published"}), {b"type": kind})


def _kafka(number: bytes, error: bytes, _: bytes, encoded: bytes) -> None:
    record = SimpleNamespace(
        headers=[(ERROR, error)],
        value=encoded or None,
        timestamp=int.from_bytes(number[:8], "big", signed=True),
        offset=1,
        partition=2,
        topic="topic",
    )
    _listed(_dead_letter_of(record))


def _amqp(kind: bytes, error: bytes, failed_at: bytes, encoded: bytes) -> None:
    texts = [one.decode(errors="replace") for one in (kind, error, failed_at)]
    for values in (texts, [kind, error, failed_at], [None, 1, 2.5]):
        properties = dict(zip(("kind", "error", "failed_at"), values, strict=True))
        _listed(read_dead_letter(encoded, properties, "message 1"))


def _due(stamp: bytes, *_: bytes) -> None:
    for value in (stamp, stamp.decode(errors="replace"), len(stamp), None):
        if not 0 <= read_due_ms(value) < 10**15:
            raise Wrong(f"due at {read_due_ms(value)}")


def _listed(dead_letter: FailedTask | UnreadableTask) -> None:
    """As it is shown to those who list the dead letters."""
    _task_of(_known(dead_letter.without_payload()))


_DELIVERIES: Final[tuple[Callable[[bytes, bytes, bytes, bytes], None], ...]] = (
    _task,
    _redis,
    _kafka,
    _amqp,
    _due,
)
