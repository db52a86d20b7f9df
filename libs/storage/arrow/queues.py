"""The lists of a queue as Arrow columns; layouts: queues.py.

All rows of a call belong to one queue. Only the columns of `schema` are made. CorruptRecord when a
row is damaged: a value that does not fit its layout goes to the exact decoder of its record, which
says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from libs.storage.arrow import columns
from libs.storage.arrow.columns import Column, Ints, Mask, Walk
from libs.storage.errors import CorruptRecord
from libs.storage.layout.buckets import MAX_ORDER, ORDER_BITS, BucketKind
from libs.storage.layout.keys import RecordType, queue_head
from libs.storage.layout.primitives import Row
from libs.storage.records.archived_records import ARCHIVED_ROW, decode_archived
from libs.storage.records.queues import (
    AVAILABLE_ROW,
    DONE_ROW,
    FAILED_ROW,
    IN_FLIGHT_ROW,
    decode_active,
    decode_attempts,
    decode_done,
    decode_failed,
)

AVAILABLE: Final = "available"
IN_FLIGHT: Final = "in-flight"

_WAITING: Final = columns.row_type(AVAILABLE_ROW)
_CLAIMED: Final = columns.row_type(IN_FLIGHT_ROW)
_DONE: Final = columns.row_type(DONE_ROW)
_FAILED: Final = columns.row_type(FAILED_ROW)
_ARCHIVED: Final = columns.row_type(ARCHIVED_ROW)


def _field(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


_HEAD: Final = [
    _field("queue", pa.string()),
    _field("broker_shard", pa.int32()),
    _field("message_id", pa.int64()),
]

ACTIVE_SCHEMA: Final = pa.schema(
    [
        *_HEAD,
        _field("state", pa.string()),
        _field("timed", pa.bool_()),
        _field("priority", pa.int32()),
        _field("attempts", pa.int32()),
        _field("visible_at", columns.TIMESTAMP, nullable=True),
        _field("retention_deadline", columns.TIMESTAMP, nullable=True),
        _field("claimed_at", columns.TIMESTAMP, nullable=True),
        _field("lease_deadline", columns.TIMESTAMP, nullable=True),
        _field("lease_length_ms", pa.int64(), nullable=True),
        _field("consumer", pa.string(), nullable=True),
        _field("bucket_order", pa.int64()),
        _field("bucket_number", pa.int64()),
    ]
)
"""A message that is available, delayed or in flight; without its lease, which is secret."""

DONE_SCHEMA: Final = pa.schema(
    [
        *_HEAD,
        _field("done_at", columns.TIMESTAMP),
        _field("attempts", pa.int32()),
        _field("consumer", pa.string()),
        _field("first_claimed_at", columns.TIMESTAMP, nullable=True),
        _field("transferred_to", pa.string(), nullable=True),
        _field("bucket_order", pa.int64()),
        _field("day", pa.date32()),
    ]
)
"""A message that was acked or transferred to another queue; `day` is the day of that."""

FAILED_SCHEMA: Final = pa.schema(
    [
        *_HEAD,
        _field("failed_at", columns.TIMESTAMP),
        _field("attempts", pa.int32()),
        _field("priority", pa.int32()),
        _field("retention_deadline", columns.TIMESTAMP, nullable=True),
        _field("reason", pa.string()),
        _field("bucket_order", pa.int64()),
        _field("day", pa.date32()),
    ]
)
"""A dead letter; `day` is the day on which it failed."""

ARCHIVED_SCHEMA: Final = pa.schema(
    [
        *_HEAD,
        _field("failed_at", columns.TIMESTAMP),
        _field("archived_at", columns.TIMESTAMP),
        _field("attempts", pa.int32()),
        _field("priority", pa.int32()),
        _field("retention_deadline", columns.TIMESTAMP, nullable=True),
        _field("run", pa.string()),
        _field("bucket_order", pa.int64()),
        _field("day", pa.date32()),
    ]
)
"""A dead letter whose content is in the archive; `day` is the day on which it was archived."""

ATTEMPTS_SCHEMA: Final = pa.schema(
    [
        *_HEAD,
        _field("attempt", pa.int32()),
        _field("consumer", pa.string()),
        _field("claimed_at", columns.TIMESTAMP, nullable=True),
        _field("outcome", pa.string()),
        _field("failed_in", pa.string()),
    ]
)
"""A failed attempt, counted from 1. `failed_in` is the queue in which it failed."""


class QueueShard(NamedTuple):
    """The queue that rows belong to, and its broker shard."""

    queue: str
    broker_shard: int


class _Keys(NamedTuple):
    """For each bucket: its order, whether it is timed, and its number, 0 unless it is timed."""

    orders: Ints
    timed: Mask
    numbers: Ints

    def at(self, places: Ints) -> _Keys:
        return _Keys(self.orders[places], self.timed[places], self.numbers[places])


def _keys(rows: Sequence[Row], queue: str) -> _Keys:
    head = len(queue_head(RecordType.ACTIVE, queue))
    # The key of a timed bucket has another number after the bucket number.
    words = b"".join([key[head:].ljust(16, b"\x00") for key, _ in rows])
    buckets, numbers = np.frombuffer(words, ">u8").astype(np.int64).reshape(-1, 2).T
    timed = np.equal(buckets >> ORDER_BITS & 3, BucketKind.TIMED)
    return _Keys(buckets & MAX_ORDER, timed, numbers)


def active_batches(
    rows: Sequence[Row],
    place: QueueShard,
    head_order: int = 0,
    head_offset: int = 0,
    schema: pa.Schema = ACTIVE_SCHEMA,
) -> list[pa.RecordBatch]:
    """The messages of active buckets: those available, then those in flight.

    Leaves out the first `head_offset` messages of the bucket `head_order`, if that comes first.
    """
    walk = _walk(rows)
    counts, waiting = walk.fixed(_WAITING)
    claimed_counts, claimed = walk.fixed(_CLAIMED)
    deadlines = walk.beside(claimed_counts, "<i8")
    lengths = walk.beside(claimed_counts, "<u4")
    consumers = walk.texts_beside(claimed_counts)
    walk.beside(claimed_counts, "<u8")  # leases are secret
    _finish(walk, rows, "active value", decode_active)
    keys = _keys(rows, place.queue)
    if head_offset and keys.orders[0] == head_order:
        taken = min(head_offset, int(counts[0]))
        counts = np.concatenate((counts[:1] - taken, counts[1:]))
        waiting = waiting[taken:]
    names = partial(columns.texts, "active value", walk.data, consumers)
    places, at = keys.at(columns.owners(counts)), keys.at(columns.owners(claimed_counts))
    batches = (
        _available(schema, place, places, waiting),
        _in_flight(schema, place, at, claimed, deadlines, lengths, names),
    )
    return [batch for batch in batches if batch.num_rows]


def _available(
    schema: pa.Schema, place: QueueShard, keys: _Keys, waiting: npt.NDArray[Any]
) -> pa.RecordBatch:
    size = len(waiting)
    return _batch(
        schema,
        ACTIVE_SCHEMA,
        place,
        waiting["message_id"],
        lambda: pa.repeat(AVAILABLE, size),
        lambda: pa.array(keys.timed),
        waiting["priority"],
        waiting["attempts"],
        lambda: columns.times(waiting["visible_at_ms"], zero_is_none=True),
        lambda: columns.times(waiting["retention_deadline_ms"], zero_is_none=True),
        lambda: pa.nulls(size, columns.TIMESTAMP),
        lambda: pa.nulls(size, columns.TIMESTAMP),
        lambda: pa.nulls(size, pa.int64()),
        lambda: pa.nulls(size, pa.string()),
        keys.orders,
        keys.numbers,
    )


def _in_flight(
    schema: pa.Schema,
    place: QueueShard,
    keys: _Keys,
    claimed: npt.NDArray[Any],
    deadlines_ms: npt.NDArray[Any],
    lengths_ms: npt.NDArray[Any],
    consumers: Column,
) -> pa.RecordBatch:
    size = len(claimed)
    return _batch(
        schema,
        ACTIVE_SCHEMA,
        place,
        claimed["message_id"],
        lambda: pa.repeat(IN_FLIGHT, size),
        lambda: pa.repeat(False, size),
        claimed["priority"],
        claimed["attempts"],
        lambda: pa.nulls(size, columns.TIMESTAMP),
        lambda: columns.times(deadlines_ms, zero_is_none=True),
        lambda: columns.times(claimed["claimed_at_ms"]),
        lambda: columns.times(claimed["lease_deadline_ms"]),
        lengths_ms,
        consumers,
        keys.orders,
        keys.numbers,
    )


def done_batch(
    rows: Sequence[Row], place: QueueShard, schema: pa.Schema = DONE_SCHEMA
) -> pa.RecordBatch:
    walk = _walk(rows)
    counts, done = walk.fixed(_DONE)
    consumers, claimed = walk.texts_beside(counts), walk.beside(counts, "<i8")
    walk.beside(counts, "<u8")  # leases
    targets = walk.texts_beside(counts)
    _finish(walk, rows, "done value", decode_done)
    return _batch(
        schema,
        DONE_SCHEMA,
        place,
        done["message_id"],
        lambda: columns.times(done["done_at_ms"]),
        done["attempts"],
        lambda: columns.texts("done value", walk.data, consumers),
        lambda: columns.times(claimed, zero_is_none=True),
        lambda: columns.present(columns.texts("done value", walk.data, targets), targets[1]),
        lambda: _orders(rows, counts),
        lambda: columns.days(done["done_at_ms"]),
    )


def _orders(rows: Sequence[Row], counts: Ints) -> pa.Array:
    return pa.array(columns.last_numbers(rows)[columns.owners(counts)] & MAX_ORDER)


def failed_batch(
    rows: Sequence[Row], place: QueueShard, schema: pa.Schema = FAILED_SCHEMA
) -> pa.RecordBatch:
    walk = _walk(rows)
    counts, failed = walk.fixed(_FAILED)
    priorities, deadlines = walk.beside(counts, "u1"), walk.beside(counts, "<i8")
    reasons = walk.texts_beside(counts)
    _finish(walk, rows, "failed value", decode_failed)
    return _batch(
        schema,
        FAILED_SCHEMA,
        place,
        failed["message_id"],
        lambda: columns.times(failed["failed_at_ms"]),
        failed["attempts"],
        priorities,
        lambda: columns.times(deadlines, zero_is_none=True),
        lambda: columns.texts("failed value", walk.data, reasons),
        lambda: _orders(rows, counts),
        lambda: columns.days(failed["failed_at_ms"]),
    )


def archived_batch(
    rows: Sequence[Row], place: QueueShard, schema: pa.Schema = ARCHIVED_SCHEMA
) -> pa.RecordBatch:
    walk = _walk(rows)
    counts, archived = walk.fixed(_ARCHIVED)
    run_counts, runs = walk.texts()
    owners = columns.owners(counts)
    walk.odd[owners[archived["run"] >= run_counts[owners]]] = True
    _finish(walk, rows, "archived value", decode_archived)

    def names() -> pa.Array:
        firsts = np.cumsum(run_counts) - run_counts
        texts = columns.texts("archived value", walk.data, runs)
        return texts.take(pa.array(firsts[owners] + archived["run"]))

    return _batch(
        schema,
        ARCHIVED_SCHEMA,
        place,
        archived["message_id"],
        lambda: columns.times(archived["failed_at_ms"]),
        lambda: columns.times(archived["archived_at_ms"]),
        archived["attempts"],
        archived["priority"],
        lambda: columns.times(archived["retention_deadline_ms"], zero_is_none=True),
        names,
        lambda: _orders(rows, counts),
        lambda: columns.days(archived["archived_at_ms"]),
    )


def attempts_batch(
    rows: Sequence[Row], place: QueueShard, schema: pa.Schema = ATTEMPTS_SCHEMA
) -> pa.RecordBatch:
    walk = _walk(rows)
    counts, consumers = walk.texts()
    claimed, outcomes = walk.beside(counts, "<i8"), walk.texts_beside(counts)
    queues = walk.texts_beside(counts)
    _finish(walk, rows, "attempts value", decode_attempts)

    def failed_in() -> pa.Array:
        texts = columns.texts("attempts value", walk.data, queues)
        return columns.present(texts, queues[1]).fill_null(place.queue)

    return _batch(
        schema,
        ATTEMPTS_SCHEMA,
        place,
        columns.last_numbers(rows)[columns.owners(counts)],
        columns.elements(np.ones_like(counts), counts, 1),
        lambda: columns.texts("attempts value", walk.data, consumers),
        lambda: columns.times(claimed, zero_is_none=True),
        lambda: columns.texts("attempts value", walk.data, outcomes),
        failed_in,
    )


def _walk(rows: Sequence[Row]) -> Walk:
    return Walk([value for _, value in rows])


def _finish(
    walk: Walk, rows: Sequence[Row], record: str, decode: Callable[[bytes], object]
) -> None:
    walk.finish()
    for index in np.flatnonzero(walk.odd).tolist():
        decode(rows[index][1])  # says what is wrong
        raise CorruptRecord(record, "columns and exact decoder disagree")


def _batch(
    chosen: pa.Schema, schema: pa.Schema, place: QueueShard, message_ids: Any, *rest: Any
) -> pa.RecordBatch:
    """The chosen columns of a schema. A column is numbers to cast, or a function that makes it."""
    size = len(message_ids)
    found = (
        lambda: pa.repeat(place.queue, size),
        lambda: pa.repeat(pa.scalar(place.broker_shard, pa.int32()), size),
        message_ids,
        *rest,
    )
    made: dict[str, Column] = {
        field.name: column if callable(column) else partial(_cast, column, field.type)
        for column, field in zip(found, schema, strict=True)
    }
    return columns.batch(chosen, made)


def _cast(numbers: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    return pa.array(numbers).cast(kind)
