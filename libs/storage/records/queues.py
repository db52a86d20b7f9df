"""The values of a queue's lists: a bucket of active, done or failed messages, and attempts.

    active value       | Array<AvailableMessage> | Array<InFlightMessage>
                       | retention deadline: Array<i64> | lease length: Array<u32>
                       | consumer: Array<Utf8> | lease: Array<u64> |             of those in flight
    AvailableMessage   | message ID u64 | priority u8 | visible at i64 | retention deadline i64
                       | attempts u16 |
    InFlightMessage    | message ID u64 | priority u8 | claimed at i64 | lease deadline i64
                       | attempts u16 |

    done value         | Array<DoneMessage>
                       | consumer: Array<Utf8> | first claimed at: Array<i64> | lease: Array<u64>
                       | transferred to: Array<Utf8>, left out where all are "" |
    DoneMessage        | message ID u64 | done at i64 | attempts u16 |

    failed value       | Array<FailedMessage>
                       | priority: Array<u8> | retention deadline: Array<i64>
                       | reason: Array<Utf8> |
    FailedMessage      | message ID u64 | failed at i64 | attempts u16 |

    attempts value     | consumer: Array<Utf8>
                       | claimed at: Array<i64> | outcome and reason: Array<Utf8>
                       | queue: Array<Utf8>, left out where all are "" |

Little-endian; times and deadlines in milliseconds since 1970, UTC, lengths in milliseconds; a
retention deadline of 0 means never. The arrays below the first line of a value are ours, in the
order of its elements: a reader of the RFC's layout stops before them, and they are read as 0 or ""
where missing or empty.
"""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

from libs.storage.layout.primitives import Fixed, Reader, count_prefix, number_array, utf8_array

# Six empty arrays less the available one: most buckets hold no message in flight.
_NO_IN_FLIGHT: Final = bytes(5 * 2)
_OF_AVAILABLE: Final = {
    "message_id": "Q",
    "priority": "B",
    "visible_at_ms": "q",
    "retention_deadline_ms": "q",
    "attempts": "H",
}
AVAILABLE_ROW = Fixed(**_OF_AVAILABLE)
_FEW: Final = [struct.Struct("<H" + "".join(_OF_AVAILABLE.values()) * n) for n in range(17)]
"""An array of available messages, by their number."""
_NEW: Final = "QB8xq2x"
"""An available message without a time that was never claimed: ID, priority, deadline."""
_NEW_ONE: Final = struct.Struct("<" + _NEW)
_NEW_FEW: Final = [
    struct.Struct("<H" + _NEW * n + f"{len(_NO_IN_FLIGHT)}x") for n in range(len(_FEW))
]

IN_FLIGHT_ROW = Fixed(
    message_id="Q", priority="B", claimed_at_ms="q", lease_deadline_ms="q", attempts="H"
)
DONE_ROW = Fixed(message_id="Q", done_at_ms="q", attempts="H")
FAILED_ROW = Fixed(message_id="Q", failed_at_ms="q", attempts="H")


class AvailableMessage(NamedTuple):
    """A message that waits, or is delayed until `visible_at_ms`."""

    message_id: int
    priority: int
    visible_at_ms: int
    retention_deadline_ms: int
    attempts: int


available_message: Final[Callable[[tuple[int, ...]], AvailableMessage]] = partial(
    tuple.__new__, AvailableMessage
)
"""Makes one of its five fields, faster than `_make`: every message is made by this."""


class InFlightMessage(NamedTuple):
    """A claimed message; the RFC's five fields first, then ours. A lease of 0 means none."""

    message_id: int
    priority: int
    claimed_at_ms: int
    lease_deadline_ms: int
    attempts: int
    retention_deadline_ms: int = 0
    lease_length_ms: int = 0
    consumer: str = ""
    lease: int = 0


class DoneMessage(NamedTuple):
    """An acked message; the RFC's three fields first, then ours.

    `transferred_to` is the queue that has it now; empty if it was acked.
    """

    message_id: int
    done_at_ms: int
    attempts: int
    consumer: str = ""
    first_claimed_at_ms: int = 0
    lease: int = 0
    transferred_to: str = ""


class FailedMessage(NamedTuple):
    """A message without attempts left; the RFC's three fields first, then ours."""

    message_id: int
    failed_at_ms: int
    attempts: int
    priority: int = 0
    retention_deadline_ms: int = 0
    reason: str = ""


class FailedAttempt(NamedTuple):
    """One failed attempt: who claimed the message when, and how that ended ("nack: boom").

    `queue` is where that was; empty if in the queue of the record.
    """

    consumer: str
    claimed_at_ms: int = 0
    outcome: str = ""
    queue: str = ""


def encode_active(
    available: Sequence[tuple[int, int, int, int, int]], in_flight: Sequence[tuple[Any, ...]]
) -> bytes:
    """Active value of one bucket, from AvailableMessages and InFlightMessages, or their fields."""
    if not in_flight:
        count = len(available)
        if count < len(_FEW):  # as each bucket where ten thousand queues share the messages
            try:
                return _FEW[count].pack(count, *chain.from_iterable(available)) + _NO_IN_FLIGHT
            except struct.error:
                pass  # does not name the field that does not fit; what follows does
        return AVAILABLE_ROW.pack_array("available", available) + _NO_IN_FLIGHT
    return encode_in_flight(list(zip(*in_flight, strict=True)), available)


def encode_new(message_ids: Sequence[int], priority: int, deadlines_ms: Sequence[int]) -> bytes:
    """Like `encode_active`, from columns of messages without a time that were never claimed.

    `deadlines_ms` is empty where no message has one. A commit may write ten thousand such buckets.
    """
    count, zeros = len(message_ids), repeat(0)
    columns = message_ids, repeat(priority), deadlines_ms or zeros
    try:
        if count < len(_NEW_FEW):
            rows = zip(*columns, strict=False)
            return _NEW_FEW[count].pack(count, *chain.from_iterable(rows))
        new = b"".join(map(_NEW_ONE.pack, *columns))
        return count_prefix("available", message_ids) + new + _NO_IN_FLIGHT
    except struct.error:  # does not name the field that does not fit; this does
        ids, priorities, deadlines = columns
        return encode_active(list(zip(ids, priorities, zeros, deadlines, zeros, strict=False)), ())


def encode_in_flight(
    columns: Sequence[Sequence[Any]], available: Sequence[tuple[int, int, int, int, int]] = ()
) -> bytes:
    """Like `encode_active`, from the columns of InFlightMessages."""
    return b"".join(
        (
            AVAILABLE_ROW.pack_array("available", available),
            IN_FLIGHT_ROW.pack_columns("in_flight", *columns[:5]),
            number_array("retention_deadline_ms", "q", columns[5]),
            number_array("lease_length_ms", "I", columns[6]),
            utf8_array("consumer", columns[7]),
            number_array("lease", "Q", columns[8]),
        )
    )


def decode_active(data: bytes) -> tuple[list[AvailableMessage], list[InFlightMessage]]:
    reader = Reader("active value", data)
    available = list(map(available_message, reader.array("available", AVAILABLE_ROW)))
    rows = list(reader.array("in_flight", IN_FLIGHT_ROW))
    count = len(rows)
    columns = (
        reader.parallel_numbers("retention_deadline_ms", "q", count),
        reader.parallel_numbers("lease_length_ms", "I", count),
        reader.parallel_texts("consumer", count),
        reader.parallel_numbers("lease", "Q", count),
    )
    reader.finish()
    return available, list(map(InFlightMessage, *zip(*rows, strict=True), *columns))


def encode_done(done: Sequence[tuple[Any, ...]]) -> bytes:
    columns = _columns(done, len(DoneMessage._fields))
    return b"".join(
        (
            DONE_ROW.pack_columns("done", *columns[:3]),
            utf8_array("consumer", columns[3]),
            number_array("first_claimed_at_ms", "q", columns[4]),
            number_array("lease", "Q", columns[5]),
            utf8_array("transferred_to", columns[6]) if any(columns[6]) else b"",
        )
    )


def decode_done(data: bytes) -> list[DoneMessage]:
    reader = Reader("done value", data)
    rows = list(reader.array("done", DONE_ROW))
    columns = (
        reader.parallel_texts("consumer", len(rows)),
        reader.parallel_numbers("first_claimed_at_ms", "q", len(rows)),
        reader.parallel_numbers("lease", "Q", len(rows)),
        reader.parallel_texts("transferred_to", len(rows)),
    )
    reader.finish()
    return list(map(DoneMessage, *zip(*rows, strict=True), *columns))


def decode_done_heads(data: bytes) -> list[tuple[int, int, int]]:
    """Message ID, done at and attempts of each message of one bucket, as the RFC has them."""
    return list(Reader("done value", data).array("done", DONE_ROW))


def encode_failed(failed: Sequence[FailedMessage]) -> bytes:
    columns = _columns(failed, len(FailedMessage._fields))
    return b"".join(
        (
            FAILED_ROW.pack_array("failed", list(zip(*columns[:3], strict=True))),
            number_array("priority", "B", columns[3]),
            number_array("retention_deadline_ms", "q", columns[4]),
            utf8_array("reason", columns[5]),
        )
    )


def decode_failed(data: bytes) -> list[FailedMessage]:
    reader = Reader("failed value", data)
    rows = list(reader.array("failed", FAILED_ROW))
    columns = (
        reader.parallel_numbers("priority", "B", len(rows)),
        reader.parallel_numbers("retention_deadline_ms", "q", len(rows)),
        reader.parallel_texts("reason", len(rows)),
    )
    reader.finish()
    return list(map(FailedMessage, *zip(*rows, strict=True), *columns))


def encode_attempts(attempts: Sequence[FailedAttempt]) -> bytes:
    """Attempts value of one message in one queue, in the order of the claims."""
    consumers, claimed_at_ms, outcomes, queues = _columns(attempts, len(FailedAttempt._fields))
    return b"".join(
        (
            utf8_array("consumer", consumers),
            number_array("claimed_at_ms", "q", claimed_at_ms),
            utf8_array("outcome", outcomes),
            utf8_array("queue", queues) if any(queues) else b"",
        )
    )


def decode_attempts(data: bytes) -> list[FailedAttempt]:
    """The failed attempts of one message in one queue, in the order of the claims."""
    reader = Reader("attempts value", data)
    consumers = reader.utf8_array("consumer")
    count = len(consumers)
    claimed_at_ms = reader.parallel_numbers("claimed_at_ms", "q", count)
    outcomes = reader.parallel_texts("outcome", count)
    queues = reader.parallel_texts("queue", count)
    reader.finish()
    return list(map(FailedAttempt, consumers, claimed_at_ms, outcomes, queues))


def _columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[tuple[Any, ...]]:
    return list(zip(*rows, strict=True)) if rows else [()] * width
