"""The push of what a dead letter carried, or carries from now on, as a row of the outbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from libs.storage.database.blobs import Blobs
from libs.storage.records.execution_records import OutboxRecord, encode_outbox
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES, PayloadUri


class MessageContent(Protocol):
    """What a message carries; the protobuf messages that have both fields are of this shape."""

    @property
    def payload(self) -> bytes:
        """Any bytes."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Any texts by name."""


async def outbox_row(
    queue_id: str, content: MessageContent, retention_deadline_ms: int, blobs: Blobs, now_ms: int
) -> bytes:
    """The row that pushes this content into a queue, to end when the dead letter would have.

    A payload too large for a row is a durable object once this returns.
    """
    payload: bytes | PayloadUri = content.payload
    if len(content.payload) > INLINE_PAYLOAD_MAX_BYTES:
        payload = PayloadUri(await blobs.put(content.payload))
    return encode_outbox(
        OutboxRecord(
            pushed_at_ms=now_ms,
            queue_id=queue_id,
            payload=payload,
            payload_bytes=len(content.payload),
            headers=dict(content.headers),
            retention_s=0,
            retention_deadline_ms=retention_deadline_ms,
        )
    )
