"""Log entries and payloads as columns, beside what the exact decoders say of the same bytes."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.storage.arrow import log as arrow_log
from libs.storage.arrow.log import LOG_SCHEMA, log_batches, payload_batch
from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.records.metadata import MessageMetadata, decode_log_entry, encode_log_entry
from libs.storage.records.payloads import encode_inline, encode_uri
from tests.forms import examples
from tests.unit.storage.records.damage import Row, damage

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
FIRST_MS, LAST_MS = -62_135_596_800_000, 253_402_300_799_999
NOW_MS = 1_767_225_600_005

texts = st.text(max_size=6)
times = st.one_of(
    st.integers(NOW_MS - 10, NOW_MS + 10), st.just(0), st.integers(0, (1 << 62)), st.just(NOW_MS)
)


@st.composite
def entries(draw: st.DrawFn) -> Row:
    """A log entry as ingest writes it, or a little otherwise."""
    received_ms = draw(times)
    apart = draw(st.booleans()) and draw(st.booleans())
    message_id = sequence = draw(st.integers(1, 1 << 61))
    messages = []
    for _ in range(draw(st.integers(1, 12))):
        messages.append(
            MessageMetadata(
                message_id,
                received_ms if draw(st.booleans()) else draw(times),
                draw(times) if apart else received_ms,
                draw(times),
                draw(st.integers(0, (1 << 32) - 1)),
                draw(st.dictionaries(texts, texts, max_size=4)),
                draw(st.none() | st.integers(0, 1 << 40)),
                draw(st.integers(0, (1 << 32) - 1)),
                draw(st.sampled_from(["", "", "orders", "ü"])),
            )
        )
        message_id += draw(st.integers(1, 3))
    value = encode_log_entry(messages)
    if draw(st.integers(0, 9)) == 0:  # the form of the RFC: records alone
        bare = [_bare(message) for message in messages]
        value = encode_log_entry(bare)[: -2 * 2 - 12 * len(bare)]
    return log_key(sequence), value


def _bare(message: MessageMetadata) -> MessageMetadata:
    return MessageMetadata(
        message.message_id,
        message.created_at_ms,
        message.received_at_ms,
        message.visible_at_ms,
        message.retention_s,
        message.headers,
    )


def at(time_ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=max(FIRST_MS, min(time_ms, LAST_MS)))


def row_of(sequence: int, message: MessageMetadata) -> dict[str, Any]:
    """The row that stands for a message."""
    received_ms, retention_s = message.received_at_ms, message.retention_s
    within_ms = max(FIRST_MS, min(received_ms, LAST_MS))
    deadline_ms = within_ms + 1000 * retention_s if retention_s else 0
    return {
        "message_id": message.message_id,
        "ingest_shard": message.message_id >> 48,
        "entry_sequence": sequence,
        "created_at": at(message.created_at_ms),
        "received_at": at(received_ms),
        "visible_at": at(message.visible_at_ms) if message.visible_at_ms else None,
        "retention_s": retention_s,
        "retention_deadline": at(deadline_ms) if deadline_ms else None,
        "delay_ms": message.delay_ms,
        "payload_bytes": message.payload_bytes,
        "direct_queue": message.direct_queue_id or None,
        "headers": list(message.headers.items()),
        "day": at(received_ms).date(),
    }


def exact(rows: list[Row]) -> list[dict[str, Any]]:
    return [
        row_of(int.from_bytes(key[-8:], "big"), message)
        for key, value in rows
        for message in _checked(decode_log_entry(value))
    ]


def _checked(messages: list[MessageMetadata]) -> list[MessageMetadata]:
    for message in messages:
        if message.message_id > MAX_MESSAGE_ID:
            raise CorruptRecord("log entry", "no message ID")
    return messages


def columnar(rows: list[Row]) -> list[dict[str, Any]]:
    batches = log_batches(rows)
    for batch in batches:
        assert batch.schema == LOG_SCHEMA
        batch.validate(full=True)
    return sorted(
        (row for batch in batches for row in batch.to_pylist()),
        key=lambda row: (row["entry_sequence"], row["message_id"]),
    )


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["entry_sequence"], row["message_id"]))


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(entries(), min_size=1, max_size=8, unique_by=lambda row: row[0]))
def test_the_columns_say_what_the_exact_decoder_says(rows: list[Row]) -> None:
    assert columnar(rows) == in_order(exact(rows))


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(entries(), min_size=1, max_size=3, unique_by=lambda row: row[0]), st.data())
def test_damaged_bytes_are_never_read_otherwise_than_by_the_exact_decoder(
    rows: list[Row], data: st.DataObject
) -> None:
    damage(rows, data)
    try:
        expected = in_order(exact(rows))
    except CorruptRecord as error:
        if "a header key twice" in str(error):
            return  # the columns have such a key twice
        with pytest.raises(CorruptRecord):
            columnar(rows)
        return
    assert columnar(rows) == expected


def usual_rows(entry_count: int, message_count: int) -> list[Row]:
    rng = random.Random(7)
    rows, message_id = [], 1
    for entry in range(entry_count):
        received_ms = NOW_MS + entry
        messages = [
            MessageMetadata(
                message_id + at,
                received_ms - rng.randrange(3),
                received_ms,
                0,
                604_800,
                {"type": rng.choice(["order", "invoice"]), "region": f"eu-{rng.randrange(1000)}"},
                None,
                rng.randrange(2000),
            )
            for at in range(message_count)
        ]
        rows.append((log_key(message_id), encode_log_entry(messages)))
        message_id += message_count
    return rows


def test_entries_as_ingest_writes_them_never_need_the_exact_decoder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = usual_rows(40, 200) + usual_rows(500, 1)
    expected = exact(rows)
    monkeypatch.setattr(arrow_log, "record_spans", None)

    (batch,) = log_batches(rows)

    assert batch.to_pylist() == expected


def test_an_entry_whose_first_messages_were_removed_keeps_its_sequence() -> None:
    (key, value), *_ = usual_rows(1, 10)
    rest = encode_log_entry(decode_log_entry(value)[3:])

    found = columnar([(key, rest)])

    assert [row["message_id"] for row in found] == list(range(4, 11))
    assert {row["entry_sequence"] for row in found} == {1}


def test_payloads_and_the_uris_that_stand_for_large_ones_are_distinguished() -> None:
    first = 3 << 48
    rows = [
        (payload_key(first + 1), encode_inline(b"\xff\x00bytes")),
        (payload_key(first + 2), encode_uri("s3://bucket/blobs/ü")),
        (payload_key(first + 3), encode_inline(b"")),
    ]

    batch = payload_batch(rows)

    batch.validate(full=True)
    assert batch.column("payload").to_pylist() == [b"\xff\x00bytes", None, b""]
    assert batch.column("uri").to_pylist() == [None, "s3://bucket/blobs/ü", None]
    assert batch.column("message_id").to_pylist() == [first + 1, first + 2, first + 3]
    assert batch.column("ingest_shard").to_pylist() == [3, 3, 3]


@pytest.mark.parametrize(
    "value", [b"", b"\x01", b"\x01\x05\x00abc", b"\x03\x01\x00x", b"\x02\x01\x00\xff"]
)
def test_a_damaged_payload_is_refused(value: bytes) -> None:
    good = (payload_key(1), encode_inline(b"x"))

    with pytest.raises(CorruptRecord):
        payload_batch([good, (payload_key(2), value)])


def test_times_beyond_the_year_9999_stand_at_its_end() -> None:
    message = MessageMetadata(1, 1 << 62, NOW_MS, 1 << 61, 0, {})

    (row,) = columnar([(log_key(1), encode_log_entry([message]))])

    assert row["created_at"] == row["visible_at"] == at(LAST_MS)
    assert pa.types.is_timestamp(LOG_SCHEMA.field("created_at").type)
