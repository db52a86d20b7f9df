"""Messages and log entries, from and to protobuf. The limits of the proto are checked here."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from libs.serving import telemetry
from libs.serving.delays import check_delay_ms
from libs.serving.headers import encoded_headers
from libs.serving.limits import RETENTION_S_MAX
from libs.storage.ids import shard_of
from libs.storage.metadata import MessageMetadata, encode_headers
from libs.storage.payloads import INLINE_PAYLOAD_MAX_BYTES
from services.ingest.batches import MESSAGE_OVERHEAD_BYTES, NOT_SET, Accepted, Columns
from services.ingest.reading import Metadata
from slatemq.dedupe_shards import dedupe_shard
from slatemq.errors import InvalidArgument
from slatemq.v1.ingest_pb2 import LogEntry, LogMessage, PublishMessage, PublishRequest
from slatemq.v1.message_pb2 import Message

MESSAGES_MAX: Final = 10_000
"""Messages in a batch, and IDs in a request for payloads: some milliseconds of the event loop."""

REQUEST_ID_BYTES_MAX: Final = 128
"""A UUID has 36; every request ID is stored for ten minutes."""

DEDUPE_KEY_BYTES_MAX: Final = 255


@dataclass(frozen=True, slots=True)
class Rules:
    """What an instance asks of messages; `retention_s` is for those that state none."""

    payload_bytes_max: int
    retention_s: int
    delay_ms_max: int


def accept(request: PublishRequest, rules: Rules) -> Accepted:
    """The batch as columns. Raises InvalidArgument naming the first field that breaks a rule."""
    if len(request.request_id.encode()) > REQUEST_ID_BYTES_MAX:
        raise InvalidArgument("request_id", f"at most {REQUEST_ID_BYTES_MAX} bytes")
    return accept_messages(request.messages, rules, request.request_id)


def accept_messages(
    messages: Sequence[PublishMessage], rules: Rules, request_id: str = ""
) -> Accepted:
    """The messages as columns. Raises InvalidArgument, naming fields as `messages[3].headers`.

    Protobuf has seen to it that text is UTF-8.
    """
    if not 1 <= len(messages) <= MESSAGES_MAX:
        raise InvalidArgument("messages", f"1 to {MESSAGES_MAX} messages, not {len(messages)}")
    payload_bytes_max = rules.payload_bytes_max
    columns = Columns()
    dedupe_keys: dict[int, str] = {}
    payloads: list[bytes] = []
    large: list[int] = []
    size_bytes = 0
    # Neighbours tend to have equal headers, and share them.
    headers: dict[str, str] = {}
    encoded = encode_headers(headers)
    for at, message in enumerate(messages):
        payload = message.payload
        payload_bytes = len(payload)
        if payload_bytes > INLINE_PAYLOAD_MAX_BYTES:
            if payload_bytes > payload_bytes_max:
                raise InvalidArgument(
                    f"messages[{at}].payload",
                    f"{payload_bytes} bytes, at most {payload_bytes_max} are allowed",
                )
            large.append(at)
        created = retention = NOT_SET
        if message.HasField("created_at_ms"):
            created = message.created_at_ms
            if created < 0:
                raise InvalidArgument(f"messages[{at}].created_at_ms", "may not be negative")
        if message.HasField("retention_s"):
            retention = message.retention_s
            if not 0 <= retention <= RETENTION_S_MAX:
                raise InvalidArgument(
                    f"messages[{at}].retention_s", f"must be within 0..{RETENTION_S_MAX}"
                )
        else:
            retention = rules.retention_s
        if message.visible_at_ms or message.HasField("delay_ms"):
            _take_times(columns, at, message, rules.delay_ms_max)
        if message.dedupe_key:
            dedupe_keys[at] = _dedupe_key(at, message.dedupe_key)
        given = message.headers
        own = {key: given[key] for key in given}  # dict(given) takes half as long again
        if own != headers:
            headers = own
            encoded = encoded_headers("messages[{}].headers", at, headers)
        payloads.append(payload)
        columns.headers.append(headers)
        columns.header_bytes.append(encoded)
        columns.created_at_ms.append(created)
        columns.retention_s.append(retention)
        columns.payload_bytes.append(payload_bytes)
        size_bytes += payload_bytes + len(encoded)
    size_bytes += len(payloads) * MESSAGE_OVERHEAD_BYTES
    return Accepted(payloads, columns, request_id, large, size_bytes, dedupe_keys)


def _take_times(columns: Columns, at: int, message: PublishMessage, delay_ms_max: int) -> None:
    if message.HasField("delay_ms"):
        if message.HasField("visible_at_ms"):
            raise InvalidArgument(
                f"messages[{at}].delay_ms", "may not be given together with visible_at_ms"
            )
        columns.delay_ms[at] = check_delay_ms(
            f"messages[{at}].delay_ms", message.delay_ms, delay_ms_max
        )
    elif message.visible_at_ms < 0:
        raise InvalidArgument(f"messages[{at}].visible_at_ms", "may not be negative")
    elif message.visible_at_ms > 0:
        columns.visible_at_ms[at] = message.visible_at_ms


def _dedupe_key(at: int, key: str) -> str:
    if len(key.encode()) > DEDUPE_KEY_BYTES_MAX:
        raise InvalidArgument(
            f"messages[{at}].dedupe_key", f"at most {DEDUPE_KEY_BYTES_MAX} bytes are allowed"
        )
    return key


def carry_trace(columns: Columns) -> None:
    """Put the current trace context into the headers of each message that has room for it."""
    for at, headers in enumerate(columns.headers):
        telemetry.inject(headers)
        columns.header_bytes[at] = encode_headers(headers)


def log_entry(sequence: int, messages: Sequence[MessageMetadata]) -> LogEntry:
    """A log entry for those who do not know how it is stored."""
    return LogEntry(
        sequence=sequence,
        messages=[
            LogMessage(
                message_id=message.message_id,
                headers=message.headers,
                created_at_ms=message.created_at_ms,
                received_at_ms=message.received_at_ms,
                visible_at_ms=message.visible_at_ms,
                retention_s=message.retention_s,
                payload_bytes=message.payload_bytes,
                delay_ms=message.delay_ms,
                direct_queue_id=message.direct_queue_id,
            )
            for message in messages
        ],
    )


def to_message(metadata: Metadata, payload: bytes) -> Message:
    """A message as consumers receive it."""
    return Message(
        message_id=metadata.message_id,
        payload=payload,
        headers=metadata.headers,
        created_at_ms=metadata.created_at_ms,
        received_at_ms=metadata.received_at_ms,
        retention_s=metadata.retention_s,
    )


def check_dedupe_shards(
    dedupe_keys: Mapping[int, str], shards: Collection[int], shard: int
) -> None:
    """Raises InvalidArgument for a dedupe key that belongs to another of the shards."""
    for at, key in dedupe_keys.items():
        wanted = dedupe_shard(key, shards)
        if wanted != shard:
            raise InvalidArgument(
                f"messages[{at}].dedupe_key",
                f"belongs to ingest shard {wanted}, this is {shard}",
                reason="WRONG_SHARD",
                metadata={"shard": str(wanted)},
            )


def check_message_ids(message_ids: Sequence[int], shard: int) -> None:
    """Raises InvalidArgument for too few or too many IDs, and for one of another shard."""
    if not 1 <= len(message_ids) <= MESSAGES_MAX:
        raise InvalidArgument("message_ids", f"1 to {MESSAGES_MAX} IDs, not {len(message_ids)}")
    for at, message_id in enumerate(message_ids):
        if message_id <= 0 or shard_of(message_id) != shard:
            raise InvalidArgument(
                f"message_ids[{at}]", f"{message_id} is no message of ingest shard {shard}"
            )
