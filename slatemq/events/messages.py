"""Events as messages of queues."""

from __future__ import annotations

from slatemq.events.envelope import Event, encode_event, parse_timestamp
from slatemq.events.s3 import headers_of
from slatemq.models import OutgoingMessage

__all__ = ["message_of"]


def message_of(event: Event) -> OutgoingMessage:
    """The message that carries an event.

    Its payload is the envelope, its headers are those that queues filter on, and its dedupe key is
    the event's ID: an event that is published again within the instance's dedupe window stores
    nothing.
    """
    return OutgoingMessage(
        encode_event(event),
        headers_of(event),
        created_at_ms=parse_timestamp("timestamp", event.timestamp),
        dedupe_key=event.id,
    )
