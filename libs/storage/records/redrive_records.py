"""A redrive: which dead letters it moves, to where, and its progress.

    redrive 0x4E  | queue revision u64 | state u8 | rate u32 | created at i64 | ended at i64
                  | total u64 | examined u64 | redriven u64
                  | next order u64 | next place u32 | end order u64
                  | queue ID Utf8 | target queue ID Utf8 | filter Utf8 | request ID Utf8
                  | error Utf8 | principal Utf8 | message IDs: Array<u64> |

Little-endian; times in milliseconds since 1970, UTC; the rate in messages per second, 0: no bound.
The queue revision is that of the queue's creation: a later queue of the same name has another. The
redrive continues at the next order, a row of the failed list, with the message at the next place in
it; after the end order it is done. The principal is the one that started or last resumed it, empty
where there was no policy. No message IDs: all.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, number_array, utf8

_FIXED = Fixed(
    queue_revision="Q",
    state="B",
    rate="I",
    created_at_ms="q",
    ended_at_ms="q",
    total_count="Q",
    examined_count="Q",
    redriven_count="Q",
    next_order="Q",
    next_place="I",
    end_order="Q",
)


class RedriveState(IntEnum):
    """The numbers are those of the proto."""

    RUNNING = 1
    CANCELLED = 2
    DONE = 3
    FAILED = 4


class RedriveRecord(NamedTuple):
    queue_revision: int
    state: RedriveState
    rate: int
    created_at_ms: int
    ended_at_ms: int
    total_count: int
    examined_count: int
    redriven_count: int
    next_order: int
    next_place: int
    end_order: int
    queue_id: str
    target_queue_id: str
    filter: str = ""
    request_id: str = ""
    error: str = ""
    principal: str = ""
    message_ids: Sequence[int] = ()


_NUMBERS = len(_FIXED.names)


def encode_redrive(redrive: RedriveRecord) -> bytes:
    return b"".join(
        (
            _FIXED.pack(*redrive[:_NUMBERS]),
            utf8("queue ID", redrive.queue_id),
            utf8("target queue ID", redrive.target_queue_id),
            utf8("filter", redrive.filter),
            utf8("request ID", redrive.request_id),
            utf8("error", redrive.error),
            utf8("principal", redrive.principal),
            number_array("message IDs", "Q", redrive.message_ids),
        )
    )


def decode_redrive(data: bytes) -> RedriveRecord:
    reader = Reader("redrive", data)
    revision, state, *numbers = reader.fixed("numbers", _FIXED)
    texts = [
        reader.utf8(name)
        for name in ("queue ID", "target queue ID", "filter", "request ID", "error", "principal")
    ]
    message_ids = reader.number_array("message IDs", "Q")
    reader.finish()
    try:
        known = RedriveState(state)
    except ValueError:
        raise reader.corrupt(f"unknown state {state}") from None
    return RedriveRecord._make((revision, known, *numbers, *texts, message_ids))
