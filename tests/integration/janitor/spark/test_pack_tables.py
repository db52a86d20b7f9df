"""Payloads that are stored in packs: in the table of payloads, and one by one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThanOrEqual,
)

from libs.storage.database.roots import Root, open_root
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import CorruptRecord
from libs.storage.layout.keys import payload_key
from libs.storage.layout.own_keys import LOG_BOUNDS_KEY
from libs.storage.records.log_bounds import LogBoundsRecord, encode_log_bounds
from libs.storage.records.payload_packs import PACK_MESSAGES, encode_pack, pack_key, payload_rows
from libs.storage.records.payloads import encode_inline, encode_uri
from services.janitor.jobs.contents import Contents, Unreadable
from services.janitor.jobs.owners import owners_of
from services.janitor.snapshots import SnapshotName
from services.janitor.spark import planning
from tests.integration.ingest.server import serving
from tests.integration.janitor.spark.tables_read import read, snapshot_of
from tests.integration.storage.test_snapshots import stub_of, take

ENTRY, ENTRIES = 150, 40
PACKS = -(-ENTRY // PACK_MESSAGES)
"""Of an entry."""
APART = 7
"""Of an entry, the message that has a record of its own."""


def payload_of(message_id: int) -> bytes:
    return b"payload %d" % message_id


async def fill(database: Database, leap: int = 0) -> dict[int, bytes]:
    """Entries with packs, one record alone, one that is gone; IDs leap once, as after a restart."""
    batch = Batch()
    stored: dict[int, bytes] = {}
    sequence = 1
    for entry in range(ENTRIES):
        some: list[bytes | None] = [payload_of(sequence + at) for at in range(ENTRY)]
        some[APART] = b"x" * 5000
        some[APART + 1] = None
        batch.put_all(list(payload_rows(sequence, some)))
        stored |= {sequence + at: one for at, one in enumerate(some) if one is not None}
        sequence += ENTRY + (leap if entry == ENTRIES // 2 else 0)
    await database.commit(batch)
    return stored


async def test_every_payload_is_read_once_wherever_it_is_stored(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    stored = await fill(database)

    found = await read(await snapshot_of(root, database), "payloads")

    assert len(found.rows) == len(stored)
    assert {row["message_id"]: row["payload"] for row in found.rows} == stored
    assert {(row["ingest_shard"], row["uri"]) for row in found.rows} == {(0, None)}
    assert found.rows_read == (PACKS + 1) * ENTRIES


async def test_a_scan_of_packs_is_cut_into_tasks_over_any_gap_in_the_ids(
    opened: tuple[Root, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, database = opened
    stored = await fill(database, leap=1 << 20)
    options = await snapshot_of(root, database)
    monkeypatch.setattr(planning, "PIECE_ROWS", 50)

    found = await read({**options, "partitions": "8"}, "payloads")

    assert len(found.rows) == len(stored)
    assert {row["message_id"]: row["payload"] for row in found.rows} == stored
    assert 4 <= found.tasks_count <= 16


async def test_ids_narrow_which_packs_are_read_and_never_too_far(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    stored = await fill(database)
    options = await snapshot_of(root, database)

    async def missing(*filters: Filter, wanted: set[int]) -> tuple[set[int], int]:
        found = await read(options, "payloads", *filters)
        ids = [row["message_id"] for row in found.rows]
        assert len(ids) == len(set(ids))
        return (wanted & stored.keys()) - set(ids), found.rows_read

    own = APART + 1
    seams = [1, *(1 + PACK_MESSAGES + at for at in (-1, 0, 1)), ENTRY, ENTRY + 1, ENTRY + 2]
    for one in seams:
        lost, rows_read = await missing(EqualTo(("message_id",), one), wanted={one})
        assert (lost, rows_read <= 2) == (set(), True)
    # Its own record, and the packs that begin so near that they might have it.
    some = await missing(EqualTo(("message_id",), ENTRY + own), wanted={ENTRY + own})
    assert some == (set(), 3)
    last = ENTRIES * ENTRY
    some = await missing(GreaterThanOrEqual(("message_id",), last), wanted={last})
    assert some == (set(), 1)
    early = set(range(1, 2 + PACK_MESSAGES))
    some = await missing(LessThanOrEqual(("message_id",), max(early)), wanted=early)
    assert some == (set(), 3)
    both = (PACK_MESSAGES, PACK_MESSAGES + 2)
    some = await missing(In(("message_id",), both), wanted=set(both))
    assert some == (set(), 2)
    none = await read(options, "payloads", GreaterThan(("message_id",), 1 << 61))
    assert none.rows == []


async def test_what_lies_before_the_logs_begin_is_not_read(opened: tuple[Root, Database]) -> None:
    root, database = opened
    await fill(database)
    begin = 1 + ENTRY * (ENTRIES - 1)
    batch = Batch()
    batch.put(LOG_BOUNDS_KEY, encode_log_bounds(LogBoundsRecord(begin, begin, begin + ENTRY - 1)))
    await database.commit(batch)

    found = await read(await snapshot_of(root, database), "payloads")

    assert min(row["message_id"] for row in found.rows) == begin
    assert (len(found.rows), found.rows_read) == (ENTRY - 1, PACKS + 1)


async def test_a_damaged_pack_fails_the_scan_instead_of_being_left_out(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    batch = Batch()
    batch.put(pack_key(1 + PACK_MESSAGES), encode_pack([b"a", b"b"])[:-1])
    await database.commit(batch)

    with pytest.raises(CorruptRecord, match="payload pack"):
        await read(await snapshot_of(root, database), "payloads")


async def test_what_a_real_ingest_has_stored_is_read_whole(tmp_path: Path) -> None:
    payloads = [payload_of(at) for at in range(100)] + [b"x" * 5000, b"y" * 70_000]
    async with serving(tmp_path.as_uri(), shard=2) as ingest:
        ids = await ingest.send(*payloads)
        snapshot = await take(stub_of(ingest))
        root = open_root(tmp_path.as_uri())
        name = SnapshotName(snapshot.database, snapshot.snapshot_id)
        options = {"root": root.url, "database": name.database, "snapshot": name.snapshot_id}

        found = await read(options, "payloads")
        one_by_one = await asyncio.to_thread(contents_of, root, name, ids)

    fields = {row["message_id"]: row["payload"] for row in found.rows}
    assert len(found.rows) == len(ids) == len(fields)
    assert [fields[one] for one in ids] == [*payloads[:-1], None]
    assert one_by_one == payloads


def contents_of(root: Root, name: SnapshotName, ids: list[int]) -> list[bytes | Unreadable | None]:
    with owners_of(root.url) as owners:
        contents = Contents(owners, [name])
        found = [one for some in contents.payloads([(one, 5) for one in ids]) for one in some]
        assert contents.uris(ids[:3]) == []
        contents.close()
        return found


async def test_payloads_in_packs_are_read_by_id_in_the_order_asked_for(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    stored = await fill(database, leap=1 << 20)
    batch = Batch()
    batch.put(payload_key(10_000), encode_inline(b"alone"))
    batch.put(payload_key(10_001), encode_uri("file:///nowhere"))
    await database.commit(batch)
    name = SnapshotName(database.name, await root.snapshots(database).take(600_000))
    ids = [9000, 10_000, 1 << 48, *sorted(stored, reverse=True), 9, 0]

    found = await asyncio.to_thread(contents_of, root, name, ids)

    assert found == [None, b"alone", None, *(stored[one] for one in ids[3:-2]), None, None]


async def test_a_message_in_a_damaged_pack_is_not_reported_as_gone(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await fill(database)
    batch = Batch()
    batch.put(pack_key(1 + PACK_MESSAGES), encode_pack([b"a", b"b"])[:-1])
    await database.commit(batch)
    name = SnapshotName(database.name, await root.snapshots(database).take(600_000))

    with pytest.raises(CorruptRecord, match="payload pack"):
        await asyncio.to_thread(contents_of, root, name, [3 + PACK_MESSAGES])
