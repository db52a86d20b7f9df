"""The ranges of keys that are not garbage, for readers of a snapshot.

Rows before the head of a list or of another epoch are garbage that waits to be removed, so no
reader may scan from the beginning of a queue. The state record of a queue says where its lists
begin.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from libs.storage.layout.buckets import (
    MAX_ORDER_MS,
    MAX_ORDER_N,
    BucketKind,
    bucket_number,
    last_order,
    order_of,
)
from libs.storage.layout.keys import (
    BEHIND_NUMBERS,
    LAST_NUMBER,
    RecordType,
    log_key,
    payload_key,
    queue_head,
)
from libs.storage.layout.primitives import KeyRange
from libs.storage.records.payload_packs import pack_key
from libs.storage.records.states import ArchivedRecord, QueueStateRecord

LATE_MS: Final = 60_000
"""The longest time from the end of a message to the row of the done or failed list that has it:
commands may wait for the store, and so may commits."""

_NUMBER_BYTES: Final = 8


class NumberRange(NamedTuple):
    """The rows whose keys are a head and a number within `first`..`last`, u64 big-endian.

    The keys of timed buckets have another number after it.
    """

    head: bytes
    first: int
    last: int

    @property
    def span(self) -> KeyRange:
        return KeyRange(self.key(self.first), self.key(self.last) + BEHIND_NUMBERS)

    def key(self, number: int) -> bytes:
        return self.head + number.to_bytes(_NUMBER_BYTES, "big")

    def number(self, key: bytes) -> int:
        first = len(self.head)
        return int.from_bytes(key[first : first + _NUMBER_BYTES], "big")


class Waiting(NamedTuple):
    """Active buckets of a queue: of a lane, or of what is in flight.

    The first `head_offset` elements of the bucket `head_order` are gone.
    """

    run: NumberRange
    head_order: int
    head_offset: int
    message_count: int


def log_run(first: int, last: int = LAST_NUMBER) -> NumberRange:
    return NumberRange(log_key(0)[:-_NUMBER_BYTES], first, last)


def payload_run(first_id: int, last_id: int) -> NumberRange:
    return NumberRange(payload_key(0)[:-_NUMBER_BYTES], first_id, last_id)


def pack_run(first_id: int, last_id: int) -> NumberRange:
    """The packs of payloads whose first messages have IDs from `first_id` to `last_id`."""
    return NumberRange(pack_key(0)[:-_NUMBER_BYTES], first_id, last_id)


def attempts_run(queue: str, first_id: int, last_id: int) -> NumberRange:
    return NumberRange(queue_head(RecordType.ATTEMPTS, queue), first_id, last_id)


def active_runs(queue: str, state: QueueStateRecord) -> Iterator[Waiting]:
    """All messages that are available, delayed or in flight."""
    head = queue_head(RecordType.ACTIVE, queue)
    end = last_order(state.purges.lane_epoch if state.purges else state.epoch)
    for lane in state.lanes:
        if lane.waiting_count:
            first = bucket_number(lane.priority, lane.kind, lane.head_order)
            run = NumberRange(head, first, bucket_number(lane.priority, lane.kind, end))
            yield Waiting(run, lane.head_order, lane.head_offset, lane.waiting_count)
    if state.in_flight_count:
        first = bucket_number(0, BucketKind.IN_FLIGHT, state.first_in_flight_order)
        last = bucket_number(0, BucketKind.IN_FLIGHT, last_order(state.epoch))
        yield Waiting(NumberRange(head, first, last), 0, 0, state.in_flight_count)


def done_run(
    queue: str, state: QueueStateRecord, from_ms: int, until_ms: int | None
) -> NumberRange | None:
    """The done rows that may have messages finished at from_ms ≤ time < until_ms."""
    oldest = state.oldest_done_order if state.done_count else 0
    return _finished(RecordType.DONE, queue, state.epoch, oldest, from_ms, until_ms)


def failed_run(
    queue: str, state: QueueStateRecord, from_ms: int, until_ms: int | None
) -> NumberRange | None:
    """The failed rows that may have messages that failed at from_ms ≤ time < until_ms."""
    oldest = state.oldest_failed_order if state.failed_count else 0
    return _finished(RecordType.FAILED, queue, state.epoch, oldest, from_ms, until_ms)


def archived_run(
    queue: str, state: QueueStateRecord, from_ms: int, until_ms: int | None
) -> NumberRange | None:
    """The rows that may have messages archived at from_ms ≤ time < until_ms."""
    archived = state.archived or ArchivedRecord()
    oldest = archived.oldest_order if archived.messages_count else 0
    return _finished(RecordType.ARCHIVED, queue, state.epoch, oldest, from_ms, until_ms)


def _finished(
    record_type: RecordType, queue: str, epoch: int, oldest: int, from_ms: int, until_ms: int | None
) -> NumberRange | None:
    """The rows of a list: each was written after its messages were finished, by LATE_MS at most."""
    if not oldest:
        return None
    first = max(oldest, order_of(epoch, _within(from_ms), 0))
    last = last_order(epoch)
    if until_ms is not None:
        last = order_of(epoch, _within(until_ms + LATE_MS), MAX_ORDER_N)
    return NumberRange(queue_head(record_type, queue), first, last) if first <= last else None


def _within(ms: int) -> int:
    return max(0, min(ms, MAX_ORDER_MS))
