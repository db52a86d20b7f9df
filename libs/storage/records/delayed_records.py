"""The delayed messages that one commit has routed to a queue.

    delayed 0x4C           | Array<Delayed> |
    Delayed (41 bytes)     | message ID u64 | priority u8 | visible at i64 | retention deadline i64
                           | bucket order u64 | bucket number u64 |

Little-endian, in the order in which they were routed; times in milliseconds since 1970, UTC. A
retention deadline of 0 means never. The bucket order and number are those of the timed bucket into
which the message was put.
"""

from collections.abc import Sequence
from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_DELAYED = Fixed(
    message_id="Q",
    priority="B",
    visible_at_ms="q",
    retention_deadline_ms="q",
    bucket_order="Q",
    bucket_number="Q",
)


class DelayedMessage(NamedTuple):
    """A message that was delayed when it was routed to a queue."""

    message_id: int
    priority: int
    visible_at_ms: int
    retention_deadline_ms: int
    bucket_order: int
    bucket_number: int


def encode_delayed(messages: Sequence[DelayedMessage]) -> bytes:
    return _DELAYED.pack_array("delayed messages", messages)


def decode_delayed(data: bytes) -> list[DelayedMessage]:
    reader = Reader("delayed messages", data)
    messages = [DelayedMessage(*row) for row in reader.array("messages", _DELAYED)]
    reader.finish()
    return messages
