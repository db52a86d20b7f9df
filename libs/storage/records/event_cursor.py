"""How far the events of a log are published.

    event cursor 0x58  | stream u64 | message ID u64 | lost count u64 |

Little-endian. Stream: a random number, chosen with the first cursor, from which the IDs of events
are derived, so that two instances never use one ID. Message ID: the last message whose event is
published; it and those before it need no event any more. Lost count: messages that were purged
before their events were published.
"""

from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_CURSOR = Fixed(stream="Q", message_id="Q", lost_count="Q")


class EventCursorRecord(NamedTuple):
    stream: int
    message_id: int
    lost_count: int = 0


def encode_event_cursor(cursor: EventCursorRecord) -> bytes:
    return _CURSOR.pack(*cursor)


def decode_event_cursor(data: bytes) -> EventCursorRecord:
    return EventCursorRecord(*Reader("event cursor", data).last("cursor", _CURSOR))
