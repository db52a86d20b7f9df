"""The lists of a queue as columns, beside what the exact decoders say of the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.arrow.queues import (
    ACTIVE_SCHEMA,
    ARCHIVED_SCHEMA,
    ATTEMPTS_SCHEMA,
    DONE_SCHEMA,
    FAILED_SCHEMA,
    QueueShard,
    active_batches,
    archived_batch,
    attempts_batch,
    done_batch,
    failed_batch,
)
from libs.storage.errors import CorruptRecord
from libs.storage.layout.buckets import BucketKind, bucket_number, kind_of, order_of
from libs.storage.layout.keys import active_key, attempts_key, done_key, failed_key
from libs.storage.layout.own_keys import archived_key
from libs.storage.records.archived_records import ArchivedMessage, decode_archived, encode_archived
from libs.storage.records.queues import (
    AvailableMessage,
    DoneMessage,
    FailedAttempt,
    FailedMessage,
    InFlightMessage,
    decode_active,
    decode_attempts,
    decode_done,
    decode_failed,
    encode_active,
    encode_attempts,
    encode_done,
    encode_failed,
)
from tests.forms import examples

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
HERE = QueueShard("orders", 3)
ORDER = order_of(2, 1_767_225_600_000, 5)

Row = tuple[bytes, bytes]

ids = st.integers(1, (1 << 62) - 1)
times = st.integers(0, 253_402_300_799_999) | st.just(0)
u16 = st.integers(0, 65_535)
# Few of them: runs of the same name are what the columns are made for.
texts = st.sampled_from(["", "a", "worker-b", "ü"]) | st.text(max_size=5)

available = st.builds(AvailableMessage, ids, st.integers(0, 255), times, times, u16)
in_flight = st.builds(
    InFlightMessage,
    *(ids, st.integers(0, 255), times, times, u16),
    *(times, st.integers(0, (1 << 32) - 1), texts, st.integers(0, (1 << 64) - 1)),
)
done = st.builds(DoneMessage, ids, times, u16, texts, times, st.integers(0, (1 << 64) - 1), texts)
failed = st.builds(FailedMessage, ids, times, u16, st.integers(0, 255), times, texts)
archived = st.builds(ArchivedMessage, ids, times, times, u16, st.integers(0, 255), times, texts)
attempt = st.builds(FailedAttempt, texts, times, texts, texts)

buckets = st.lists(
    st.tuples(st.lists(available, max_size=12), st.lists(in_flight, max_size=12)),
    min_size=1,
    max_size=6,
)


def at(time_ms: int) -> datetime | None:
    return EPOCH + timedelta(milliseconds=time_ms) if time_ms else None


def surely(time_ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=time_ms)


def rows_of(batches: list[pa.RecordBatch], schema: pa.Schema) -> list[dict[str, Any]]:
    for batch in batches:
        assert batch.schema == schema
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


def active_row(
    message: AvailableMessage | InFlightMessage, bucket: int, number: int
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "queue": "orders",
        "broker_shard": 3,
        "message_id": message.message_id,
        "state": "available",
        "timed": False,
        "priority": message.priority,
        "attempts": message.attempts,
        "visible_at": None,
        "retention_deadline": at(message.retention_deadline_ms),
        "claimed_at": None,
        "lease_deadline": None,
        "lease_length_ms": None,
        "consumer": None,
        "bucket_order": bucket & ((1 << 54) - 1),
        "bucket_number": number,
    }
    if isinstance(message, AvailableMessage):
        timed = bucket >> 54 & 3 == BucketKind.TIMED
        return {**row, "timed": timed, "visible_at": at(message.visible_at_ms)}
    return {
        **row,
        "state": "in-flight",
        "claimed_at": surely(message.claimed_at_ms),
        "lease_deadline": surely(message.lease_deadline_ms),
        "lease_length_ms": message.lease_length_ms,
        "consumer": message.consumer,
    }


@settings(max_examples=examples(100), deadline=None)
@given(buckets, st.integers(0, 3), st.integers(0, 255))
def test_active_buckets_of_any_kind_read_as_their_decoder_reads_them(
    lists: list[tuple[list[AvailableMessage], list[InFlightMessage]]], skipped: int, priority: int
) -> None:
    kinds = (BucketKind.READY, BucketKind.TIMED, BucketKind.IN_FLIGHT)
    numbers = [bucket_number(priority, kinds[n % 3], ORDER + n) for n in range(len(lists))]
    own = [7 * (kind_of(number) == BucketKind.TIMED) for number in numbers]  # of timed ones alone
    rows = [
        (
            active_key("orders", number) + (one.to_bytes(8, "big") if one else b""),
            encode_active(*both),
        )
        for number, one, both in zip(numbers, own, lists, strict=True)
    ]

    found = rows_of(active_batches(rows, HERE, ORDER, skipped), ACTIVE_SCHEMA)

    expected: list[dict[str, Any]] = []
    for part in (0, 1):
        for number, one, both in zip(numbers, own, lists, strict=True):
            start = skipped if part == 0 and number == numbers[0] else 0
            expected += [active_row(message, number, one) for message in both[part][start:]]
    assert found == expected


def test_messages_taken_from_the_head_bucket_are_left_out_of_that_bucket_alone() -> None:
    waiting = [AvailableMessage(n, 0, 0, 0, 0) for n in range(1, 4)]
    rows = [
        (
            active_key("orders", bucket_number(0, BucketKind.READY, ORDER + n)),
            encode_active(waiting, []),
        )
        for n in range(2)
    ]

    found = rows_of(active_batches(rows, HERE, ORDER, 2), ACTIVE_SCHEMA)
    behind = rows_of(active_batches(rows[1:], HERE, ORDER, 2), ACTIVE_SCHEMA)

    assert [row["message_id"] for row in found] == [3, 1, 2, 3]
    assert [row["message_id"] for row in behind] == [1, 2, 3]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(done, max_size=20), min_size=1, max_size=6))
def test_done_buckets_read_as_their_decoder_reads_them(lists: list[list[DoneMessage]]) -> None:
    rows = [(done_key("orders", ORDER + n), encode_done(part)) for n, part in enumerate(lists)]

    assert rows_of([done_batch(rows, HERE)], DONE_SCHEMA) == [
        {
            "queue": "orders",
            "broker_shard": 3,
            "message_id": message.message_id,
            "done_at": surely(message.done_at_ms),
            "attempts": message.attempts,
            "consumer": message.consumer,
            "first_claimed_at": at(message.first_claimed_at_ms),
            "transferred_to": message.transferred_to or None,
            "bucket_order": ORDER + n,
            "day": surely(message.done_at_ms).date(),
        }
        for n, part in enumerate(lists)
        for message in part
    ]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(failed, max_size=20), min_size=1, max_size=6))
def test_failed_buckets_read_as_their_decoder_reads_them(lists: list[list[FailedMessage]]) -> None:
    rows = [(failed_key("orders", ORDER + n), encode_failed(part)) for n, part in enumerate(lists)]

    assert rows_of([failed_batch(rows, HERE)], FAILED_SCHEMA) == [
        {
            "queue": "orders",
            "broker_shard": 3,
            "message_id": message.message_id,
            "failed_at": surely(message.failed_at_ms),
            "attempts": message.attempts,
            "priority": message.priority,
            "retention_deadline": at(message.retention_deadline_ms),
            "reason": message.reason,
            "bucket_order": ORDER + n,
            "day": surely(message.failed_at_ms).date(),
        }
        for n, part in enumerate(lists)
        for message in part
    ]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(archived, max_size=20), min_size=1, max_size=6))
def test_archived_rows_read_as_their_decoder_reads_them(
    lists: list[list[ArchivedMessage]],
) -> None:
    rows = [
        (archived_key("orders", ORDER + n), encode_archived(part)) for n, part in enumerate(lists)
    ]

    assert rows_of([archived_batch(rows, HERE)], ARCHIVED_SCHEMA) == [
        {
            "queue": "orders",
            "broker_shard": 3,
            "message_id": message.message_id,
            "failed_at": surely(message.failed_at_ms),
            "archived_at": surely(message.archived_at_ms),
            "attempts": message.attempts,
            "priority": message.priority,
            "retention_deadline": at(message.retention_deadline_ms),
            "run": message.run,
            "bucket_order": ORDER + n,
            "day": surely(message.archived_at_ms).date(),
        }
        for n, part in enumerate(lists)
        for message in part
    ]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.lists(attempt, max_size=12), min_size=1, max_size=6))
def test_attempts_read_as_their_decoder_reads_them(lists: list[list[FailedAttempt]]) -> None:
    rows = [(attempts_key("orders", 7 + n), encode_attempts(part)) for n, part in enumerate(lists)]

    assert rows_of([attempts_batch(rows, HERE)], ATTEMPTS_SCHEMA) == [
        {
            "queue": "orders",
            "broker_shard": 3,
            "message_id": 7 + n,
            "attempt": number,
            "consumer": one.consumer,
            "claimed_at": at(one.claimed_at_ms),
            "outcome": one.outcome,
            "failed_in": one.queue or "orders",
        }
        for n, part in enumerate(lists)
        for number, one in enumerate(part, 1)
    ]


RFC_ACTIVE = bytes.fromhex(
    "01002a0000000000000003e8abda769b010000859611779b010000010001002b0000000000000003d0afda769b010000"
    "0025db769b0100000200"
)


def test_the_forms_of_the_rfc_have_defaults_in_place_of_our_fields() -> None:
    buckets = [(active_key("orders", 0), RFC_ACTIVE)]
    done_rows = [(done_key("orders", 0), bytes.fromhex("01002c00000000000000b8b3da769b0100000100"))]
    failed_rows = [
        (failed_key("orders", 0), bytes.fromhex("01002d00000000000000a0b7da769b0100000300"))
    ]
    tried = [
        (attempts_key("orders", 42), bytes.fromhex("02000800776f726b65722d610800776f726b65722d62"))
    ]

    active = rows_of(active_batches(buckets, HERE), ACTIVE_SCHEMA)

    assert [(row["message_id"], row["state"]) for row in active] == [
        (42, "available"),
        (43, "in-flight"),
    ]
    assert active[1]["consumer"] == ""
    assert done_batch(done_rows, HERE).to_pylist()[0]["consumer"] == ""
    assert failed_batch(failed_rows, HERE).to_pylist()[0]["reason"] == ""
    assert [row["outcome"] for row in attempts_batch(tried, HERE).to_pylist()] == ["", ""]


ENCODED: list[tuple[Callable[[bytes], Any], Callable[[list[Row]], Any], bytes]] = [
    (
        decode_active,
        lambda rows: active_batches(rows, HERE),
        encode_active(
            [AvailableMessage(1, 2, 3, 4, 5)] * 2,
            [InFlightMessage(6, 7, 8, 9, 10, 11, 12, "c", 13)],
        ),
    ),
    (
        decode_done,
        lambda rows: done_batch(rows, HERE),
        encode_done([DoneMessage(1, 2, 3, "worker", 4, 5, "q")] * 12),
    ),
    (
        decode_failed,
        lambda rows: failed_batch(rows, HERE),
        encode_failed([FailedMessage(1, 2, 3, 4, 5, "why"), FailedMessage(6, 7, 8, 9, 10, "ü")]),
    ),
    (
        decode_archived,
        lambda rows: archived_batch(rows, HERE),
        encode_archived(
            [
                ArchivedMessage(1, 2, 3, 4, 5, 6, "one"),
                ArchivedMessage(7, 8, 9, 10, 11, 12, "ü"),
                ArchivedMessage(13, 14, 15, 16, 17, 18, "one"),
            ]
        ),
    ),
    (
        decode_attempts,
        lambda rows: attempts_batch(rows, HERE),
        encode_attempts([FailedAttempt("a", 1, "b", "c")] * 3),
    ),
]


@pytest.mark.parametrize(("decode", "columns", "value"), ENCODED)
def test_damaged_values_are_refused_wherever_their_decoder_refuses_them(
    decode: Callable[[bytes], Any], columns: Callable[[list[Row]], Any], value: bytes
) -> None:
    key = active_key("orders", 1)
    damaged = [value[:cut] for cut in range(len(value))]
    damaged += [
        value[:place] + bytes((number,)) + value[place + 1 :]
        for place in range(len(value))
        for number in (0, 1, 255)
    ]
    damaged.append(value + b"\x00")
    refused_count = 0
    for one in damaged:
        try:
            decode(one)
        except CorruptRecord:
            refused_count += 1
            with pytest.raises(CorruptRecord):
                columns([(key, value), (key, one)])
        else:
            columns([(key, value), (key, one)])
    assert refused_count > len(value)
