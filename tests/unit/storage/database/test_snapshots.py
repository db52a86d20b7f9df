"""Snapshots: what is in them, how long they last, and that commits go on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest
from slatedb.uniffi import CheckpointOptions

from libs.storage.database import snapshots as snapshots_module
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.database.snapshots import (
    BATCH_BYTES,
    BATCH_ROWS_MIN,
    SnapshotReader,
    TooManySnapshots,
)
from libs.storage.errors import Fenced, SnapshotNotFound, StorageError

LIFETIME_MS = 60_000
ROWS = 3_000


@pytest.fixture
async def opened(tmp_path: Path) -> AsyncIterator[tuple[Root, Database]]:
    root = open_root(tmp_path.as_uri())
    database = await root.database("ingest/0", Kind.INGEST)
    yield root, database
    await database.close()


def rows(keys: Iterable[int], value: bytes = b"v") -> Batch:
    batch = Batch()
    for key in keys:
        batch.put(key.to_bytes(8, "big"), value)
    return batch


async def count(reader: SnapshotReader) -> int:
    return sum([len(rows) async for rows in reader.scan(b"", b"\x01")])


async def test_a_snapshot_has_what_was_durable_in_the_wal_alone_and_nothing_that_came_later(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await database.commit(rows(range(1000)))

    snapshot = await root.snapshots(database).take(LIFETIME_MS)
    await database.commit(rows(range(500, 2000), b"later"))

    reader = await root.open_snapshot("ingest/0", snapshot)
    assert await count(reader) == reader.rows_read == 1000
    assert await reader.get((700).to_bytes(8, "big")) == b"v"
    assert await reader.get((1700).to_bytes(8, "big")) is None
    await reader.close()


async def test_an_owner_that_was_replaced_takes_no_snapshot_without_what_its_successor_committed(
    opened: tuple[Root, Database],
) -> None:
    root, replaced = opened
    await replaced.commit(rows(range(3)))
    await root.snapshots(replaced).take(LIFETIME_MS)  # nothing is left that it would have to write
    successor = await open_root(root.url).database("ingest/0", Kind.INGEST)
    await successor.commit(rows([7]))

    with pytest.raises(Fenced):
        await root.snapshots(replaced).take(LIFETIME_MS)

    snapshot = await root.snapshots(successor).take(LIFETIME_MS)
    reader = await root.open_snapshot("ingest/0", snapshot)
    assert await reader.get((7).to_bytes(8, "big")) == b"v"
    await reader.close()
    await successor.close()


async def test_another_process_reads_a_snapshot_by_the_roots_url(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await database.commit(rows(range(3)))
    snapshot = await root.snapshots(database).take(LIFETIME_MS)

    reader = await open_root(root.url).open_snapshot("ingest/0", snapshot)

    assert await count(reader) == 3
    await reader.close()


async def test_a_scan_ends_where_it_should_and_its_batches_grow_up_to_a_bound(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    await database.commit(rows(range(3000), bytes(8000)))
    reader = await root.open_snapshot("ingest/0", await root.snapshots(database).take(LIFETIME_MS))

    first, last = (5).to_bytes(8, "big"), (2990).to_bytes(8, "big")
    sizes = [len(batch) async for batch in reader.scan(first, last)]

    assert sum(sizes) == 2985
    assert sizes[0] == BATCH_ROWS_MIN
    assert max(sizes) * 8000 <= BATCH_BYTES
    assert max(sizes) * 8000 > BATCH_BYTES // 2
    sizes = [len(batch) async for batch in reader.scan(first, last, rows_max=100)]
    assert (sum(sizes), max(sizes)) == (2985, 100)
    assert [len(batch) async for batch in reader.scan(first, last, limit=20)] == [16, 4]
    assert [batch async for batch in reader.scan(last, first)] == []
    await reader.close()


async def test_commits_go_on_while_snapshots_are_taken(opened: tuple[Root, Database]) -> None:
    root, database = opened
    snapshots = root.snapshots(database)
    taking = asyncio.gather(*(snapshots.take(LIFETIME_MS) for _ in range(5)))

    key = 0
    while not taking.done():
        await database.commit(rows([key]))
        key += 1

    assert key > 5
    taken = taking.result()
    assert len(set(taken)) == 5
    reader = await root.open_snapshot("ingest/0", taken[-1])
    assert 0 < await count(reader) <= key
    await reader.close()


async def test_a_released_snapshot_is_gone_and_releasing_it_again_is_no_error(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    snapshots = root.snapshots(database)
    snapshot = await snapshots.take(LIFETIME_MS)

    await snapshots.release(snapshot)
    await snapshots.release(snapshot)

    with pytest.raises(SnapshotNotFound, match=snapshot):
        await root.open_snapshot("ingest/0", snapshot)
    with pytest.raises(SnapshotNotFound):
        await snapshots.renew(snapshot, LIFETIME_MS)
    with pytest.raises(SnapshotNotFound):
        await snapshots.renew("no ID at all", LIFETIME_MS)


async def test_a_reader_that_stood_still_until_its_snapshot_was_collected_misses_no_row_silently(
    tmp_path: Path, opened: tuple[Root, Database]
) -> None:
    # Given a scan that has begun, of more rows than are read ahead
    root, database = opened
    for first in range(0, ROWS, 100):
        await database.commit(rows(range(first, first + 100), os.urandom(8_000)))
    snapshots = root.snapshots(database)
    snapshot = await snapshots.take(LIFETIME_MS)
    reader = await root.open_snapshot("ingest/0", snapshot)
    scan = reader.scan(b"", b"\x01")
    await anext(scan)

    # When its snapshot is gone, and so are the tables in it
    await snapshots.release(snapshot)
    for table in (tmp_path / "ingest" / "0" / "compacted").iterdir():
        table.unlink()

    # Then the scan does not end as if that were all, and no row is said not to be there
    with pytest.raises(StorageError):
        [rows async for rows in scan]
    with pytest.raises(StorageError):
        await reader.get((ROWS - 1).to_bytes(8, "big"))
    with pytest.raises(SnapshotNotFound):
        await root.open_snapshot("ingest/0", snapshot)
    await reader.close()


async def test_a_renewed_snapshot_lives_on_and_one_past_its_lifetime_is_gone(
    opened: tuple[Root, Database],
) -> None:
    root, database = opened
    now_s = [0.0]
    snapshots = root.snapshots(database)
    snapshots._now_s = lambda: now_s[0]
    renewed = await snapshots.take(LIFETIME_MS)
    left = await snapshots.take(LIFETIME_MS)
    await snapshots.renew(renewed, 100 * LIFETIME_MS)
    ends = {one.id: one.expire_time_secs for one in await snapshots._admin.list_checkpoints(None)}

    now_s[0] = ends[left] + 1

    assert ends[renewed] > ends[left] + 90 * LIFETIME_MS / 1000
    await snapshots.renew(renewed, LIFETIME_MS)
    with pytest.raises(SnapshotNotFound):
        await snapshots.renew(left, LIFETIME_MS)


async def test_snapshots_are_bounded_and_releasing_one_makes_room(
    opened: tuple[Root, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots_module, "SNAPSHOTS_MAX", 4)
    root, database = opened
    snapshots = root.snapshots(database)
    taken = [await snapshots.take(LIFETIME_MS) for _ in range(4)]

    with pytest.raises(TooManySnapshots):
        await snapshots.take(LIFETIME_MS)

    await snapshots.release(taken[0])
    await snapshots.take(LIFETIME_MS)


async def test_checkpoints_of_other_tools_are_left_alone(opened: tuple[Root, Database]) -> None:
    root, database = opened
    snapshots = root.snapshots(database)
    options = CheckpointOptions(lifetime_ms=LIFETIME_MS, source=None, name="backup")
    theirs = await snapshots._admin.create_detached_checkpoint(options)

    await snapshots.release(theirs.id)

    with pytest.raises(SnapshotNotFound):
        await snapshots.renew(theirs.id, LIFETIME_MS)
    assert [one.id for one in await snapshots._admin.list_checkpoints(None)] == [theirs.id]
