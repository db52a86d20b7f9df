"""Events that wait to be published, their counter, and how far the events of a log are published.

    events 0x5A   | after u64 | events u32 | JSON bytes u32 | type Utf8 | request ID Utf8 | JSON |
    counter 0x5B  | stream u64 | last number u64 |
    cursor 0x58   | stream u64 | message ID u64 | lost count u64 |

Little-endian. A row has the events of one type that a command of one request has caused, and is
written in the batch of its change; it is removed once they are published. After: the last message
ID of the log when they happened, 0 in a broker. JSON: an array with `[when, {data}]` for each
event, where `when` is in milliseconds since 1970, UTC.

Events are numbered from 1 without a gap; a row has the number of its first in its key. Stream: a
random number, chosen with the first event, so that two instances never use one ID. Both make the ID
of an event, which never changes.

The cursor of a log has a stream of its own. Message ID: the last message whose event is published;
it and those before it need no event any more. Lost count: messages that were purged before their
events were published.
"""

from __future__ import annotations

from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, utf8

_HEAD = Fixed(after="Q", events="I", json_bytes="I")
_COUNTER = Fixed(stream="Q", last_number="Q")
_CURSOR = Fixed(stream="Q", message_id="Q", lost_count="Q")


class EventsRecord(NamedTuple):
    """Events of one row; `encoded` is their JSON."""

    after: int
    events_count: int
    event_type: str
    request_id: str
    encoded: bytes


class EventCounterRecord(NamedTuple):
    """The stream of a shard, and the number of its newest event."""

    stream: int
    last_number: int = 0


def encode_events(events: EventsRecord) -> bytes:
    return b"".join(
        (
            _HEAD.pack(events.after, events.events_count, len(events.encoded)),
            utf8("type", events.event_type),
            utf8("request ID", events.request_id),
            events.encoded,
        )
    )


def decode_events(data: bytes) -> EventsRecord:
    """Events value; CorruptRecord when it is not one. Its JSON is not parsed."""
    reader = Reader("events", data)
    after, events_count, json_bytes = reader.fixed("head", _HEAD)
    event_type, request_id = reader.utf8("type"), reader.utf8("request ID")
    encoded = bytes(reader.take("JSON", json_bytes))
    reader.finish()
    try:
        encoded.decode()
    except UnicodeDecodeError as error:
        raise reader.corrupt(f"JSON is not valid UTF-8: {error.reason}") from None
    return EventsRecord(after, events_count, event_type, request_id, encoded)


def encode_event_counter(counter: EventCounterRecord) -> bytes:
    return _COUNTER.pack(*counter)


def decode_event_counter(data: bytes) -> EventCounterRecord:
    return EventCounterRecord(*Reader("event counter", data).last("counter", _COUNTER))


class EventCursorRecord(NamedTuple):
    stream: int
    message_id: int
    lost_count: int = 0


def encode_event_cursor(cursor: EventCursorRecord) -> bytes:
    return _CURSOR.pack(*cursor)


def decode_event_cursor(data: bytes) -> EventCursorRecord:
    return EventCursorRecord(*Reader("event cursor", data).last("cursor", _CURSOR))
