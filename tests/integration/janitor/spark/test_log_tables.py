"""The tables of an ingest: messages and payloads, whole and narrowed by filters."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import CorruptRecord, SnapshotNotFound
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.records.metadata import MessageMetadata, encode_log_entry
from libs.storage.records.payloads import encode_inline
from services.janitor.spark import planning
from tests.integration.ingest.server import serving
from tests.integration.janitor.spark.tables_read import read, snapshot_of
from tests.integration.storage.test_snapshots import stub_of, take

DAY_MS = 86_400_000
FIRST_DAY = date(2026, 1, 1)
FIRST_MS = 1_767_225_600_000
DAYS, ENTRIES_A_DAY, MESSAGES = 10, 20, 3
A_DAY = ENTRIES_A_DAY * MESSAGES


async def fill(database: Database, gap_after: int = 0) -> None:
    """Ten days of messages; as after a restart, IDs may leap after this many of them."""
    batch = Batch()
    message_id = 1
    for entry in range(DAYS * ENTRIES_A_DAY):
        received_ms = FIRST_MS + entry * DAY_MS // ENTRIES_A_DAY
        messages = [
            MessageMetadata(message_id + n, received_ms, received_ms, 0, 0, {"n": str(n)})
            for n in range(MESSAGES)
        ]
        batch.put(log_key(message_id), encode_log_entry(messages))
        for message in messages:
            batch.put(payload_key(message.message_id), encode_inline(b"payload"))
        message_id += MESSAGES
        if message_id <= gap_after < message_id + MESSAGES:
            message_id += 1 << 20
    await database.commit(batch)


async def test_every_message_and_payload_of_a_snapshot_is_read_once(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    options = await snapshot_of(root, database)

    messages = await read(options, "messages")
    payloads = await read(options, "payloads")

    ids = list(range(1, DAYS * A_DAY + 1))
    assert [row["message_id"] for row in messages.rows] == ids
    assert [row["message_id"] for row in payloads.rows] == ids
    assert messages.rows[4]["headers"] == [("n", "1")]
    assert {row["payload"] for row in payloads.rows} == {b"payload"}


async def test_a_query_on_one_day_reads_that_day_and_a_few_rows_to_find_it(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    options = await snapshot_of(root, database)
    day = FIRST_DAY + timedelta(days=4)

    found = await read(options, "messages", EqualTo(("day",), day))

    assert {row["day"] for row in found.rows} == {day}
    assert len(found.rows) == A_DAY
    assert found.rows_read == ENTRIES_A_DAY


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        ((GreaterThanOrEqual(("day",), date(2026, 1, 9)),), 2),
        ((LessThan(("day",), date(2026, 1, 3)),), 2),
        ((LessThanOrEqual(("day",), date(2026, 1, 3)),), 3),
        ((GreaterThan(("day",), date(2026, 1, 8)),), 2),
        ((GreaterThan(("day",), date(2026, 2, 1)),), 0),
        ((In(("day",), (date(2026, 1, 2), date(2026, 1, 4))),), 3),
        ((EqualTo(("day",), date(2025, 1, 1)),), 0),
        ((EqualTo(("day",), FIRST_DAY), EqualTo(("day",), date(2026, 1, 2))), 0),
    ],
)
async def test_days_narrow_what_is_read(
    opened: tuple[Root, Database], days: tuple[EqualTo, ...], expected: int
) -> None:
    root, database = opened
    await fill(database)
    options = await snapshot_of(root, database)

    found = await read(options, "messages", *days)

    assert len(found.rows) == expected * A_DAY


async def test_times_and_ids_narrow_what_is_read_and_never_too_far(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    options = await snapshot_of(root, database)
    since = datetime(2026, 1, 10, 12, tzinfo=UTC)

    late = await read(options, "messages", GreaterThanOrEqual(("received_at",), since))
    early = await read(options, "messages", LessThanOrEqual(("message_id",), 5))
    inside = await read(options, "messages", EqualTo(("message_id",), 8))
    payloads = await read(options, "payloads", In(("message_id",), (7, 9)))
    none = await read(options, "payloads", GreaterThan(("message_id",), 1 << 61))

    assert [row["message_id"] for row in late.rows] == list(range(571, 601))
    assert [row["message_id"] for row in early.rows] == [1, 2, 3, 4, 5, 6]
    assert early.rows_read == 2
    assert [row["message_id"] for row in inside.rows] == [7, 8, 9]
    assert inside.rows_read == 1
    assert [row["message_id"] for row in payloads.rows] == [7, 8, 9]
    assert payloads.rows_read == 3
    assert none.rows == []


async def test_a_scan_is_cut_into_tasks_of_a_like_size_over_any_gap_in_the_ids(
    opened: tuple[Root, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, database = opened
    await fill(database, gap_after=400)
    options = await snapshot_of(root, database)
    monkeypatch.setattr(planning, "PIECE_ROWS", 50)

    found = await read({**options, "partitions": "8"}, "payloads")

    assert len(found.rows) == DAYS * A_DAY
    assert len({row["message_id"] for row in found.rows}) == DAYS * A_DAY
    assert 4 <= found.tasks_count <= 16


async def test_tables_of_several_shards_are_read_together_and_one_shard_alone_by_its_number(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    other = await root.database("ingest/5", Kind.INGEST)
    first = 5 << 48 | 1
    batch = Batch()
    batch.put(log_key(first), encode_log_entry([MessageMetadata(first, 0, FIRST_MS, 0, 0, {})]))
    await other.commit(batch)
    await fill(database)
    options = await snapshot_of(root, database, other)

    both = await read(options, "messages")
    one = await read(options, "messages", EqualTo(("ingest_shard",), 5))
    await other.close()

    assert len(both.rows) == DAYS * A_DAY + 1
    assert [row["message_id"] for row in one.rows] == [first]
    assert one.rows_read == 1


async def test_what_a_real_ingest_has_stored_is_read_with_its_headers_and_large_payloads(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path.as_uri(), shard=2) as ingest:
        ids = await ingest.send(b"small", b"x" * 70_000, type="order")
        snapshot = await take(stub_of(ingest))
        root = open_root(tmp_path.as_uri())
        options = {
            "root": root.url,
            "database": snapshot.database,
            "snapshot": snapshot.snapshot_id,
        }

        messages = await read(options, "messages")
        payloads = await read(options, "payloads")
        small, large = payloads.rows

    assert [row["message_id"] for row in messages.rows] == ids
    assert {row["ingest_shard"] for row in messages.rows} == {2}
    assert [row["payload_bytes"] for row in messages.rows] == [5, 70_000]
    assert messages.rows[0]["headers"] == [("type", "order")]
    assert (small["payload"], small["uri"]) == (b"small", None)
    assert large["payload"] is None
    assert large["uri"].startswith("blobs/")  # below the root


async def test_an_empty_log_has_no_messages(opened: tuple[Root, Database]) -> None:
    root, database = opened
    options = await snapshot_of(root, database)

    assert (await read(options, "messages")).rows == []
    assert (await read(options, "messages", EqualTo(("day",), FIRST_DAY))).rows == []
    assert (await read(options, "payloads")).rows == []
    assert (await read(options, "done")).rows == []


async def test_a_snapshot_that_was_released_is_reported_by_name(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    options = await snapshot_of(root, database)
    await root.snapshots(database).release(options["snapshot"])

    with pytest.raises(SnapshotNotFound, match=options["snapshot"]):
        await read(options, "messages")


async def test_a_damaged_entry_fails_the_scan_instead_of_being_left_out(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    batch = Batch()
    batch.put(log_key(4), b"\x01\x00damaged")
    await database.commit(batch)
    options = await snapshot_of(root, database)

    with pytest.raises(CorruptRecord):
        await read(options, "messages")
