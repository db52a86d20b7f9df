from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from slatedb.uniffi import InternalError

from libs.storage.database import slate
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import (
    Kind,
    ReplayBound,
    Tuning,
    slatedb_settings,
    tuning_of,
)
from libs.storage.database.slate import FILL_ROWS, Batch, Database, bounded
from libs.storage.errors import DamagedStore, Fenced, StoreFailed, StoreUnavailable
from libs.storage.objects.durability import NoSync


@pytest.fixture
def root() -> Root:
    return open_root("memory:///")


@pytest.fixture
async def database(root: Root) -> AsyncIterator[Database]:
    database = await root.database("broker/0", Kind.BROKER)
    yield database
    await database.close()


def _batch(*rows: tuple[bytes, bytes]) -> Batch:
    batch = Batch()
    for key, value in rows:
        batch.put(key, value)
    return batch


async def test_a_write_is_in_memory_at_once_and_durable_after_the_flush(
    database: Database,
) -> None:
    await database.write(_batch((b"k", b"v")))
    assert await database.get(b"k") == b"v"
    assert await database.get(b"k", durable=True) is None
    assert [page async for page in database.scan(b"a", b"z", durable=True)] == []

    await database.flush()

    assert await database.get(b"k", durable=True) == b"v"
    assert [page async for page in database.scan(b"a", b"z", durable=True)] == [[(b"k", b"v")]]


async def test_many_keys_are_read_in_their_order(database: Database) -> None:
    await database.commit(_batch((b"a", b"1"), (b"c", b"3")))
    assert await database.get_many([b"c", b"b", b"a"]) == [b"3", None, b"1"]
    assert await database.get_many([]) == []


async def test_a_scan_ends_before_its_end_and_at_its_limit(database: Database) -> None:
    rows = [(b"k%04d" % number, b"%d" % number) for number in range(2500)]
    await database.commit(_batch(*rows))

    async def scanned(
        start: bytes, end: bytes, limit: int | None = None, descending: bool = False
    ) -> list[tuple[bytes, bytes]]:
        pages = database.scan(start, end, limit, descending=descending)
        return [row async for page in pages for row in page]

    assert await scanned(b"k", b"l") == rows
    assert await scanned(b"k0010", b"k0020") == rows[10:20]
    assert await scanned(b"k0010", b"l", limit=3) == rows[10:13]
    assert await scanned(b"k", b"l", limit=1001) == rows[:1001]
    assert await scanned(b"k", b"l", limit=2, descending=True) == rows[:-3:-1]
    assert await scanned(b"k0010", b"k0010") == []
    assert await scanned(b"l", b"k") == []
    assert await scanned(b"k", b"l", limit=0) == []


async def test_a_batch_counts_its_operations_and_its_bytes() -> None:
    batch = Batch()
    assert (len(batch), batch.size_bytes) == (0, 0)
    batch.put(b"key", b"v" * 1000)
    batch.delete(b"key")
    assert len(batch) == 2
    assert 1006 <= batch.size_bytes < 1200


async def turns_while_filled(batch: Batch) -> int:
    """How often another task has its turn while a batch is filled."""
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    beside = asyncio.create_task(other())
    await batch.fill()
    beside.cancel()
    return turns


async def test_others_have_turns_while_a_large_batch_is_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slate, "FILL_NS", 0)  # Each look at the clock finds the step's time over.
    batch = Batch()
    batch.put_all([(b"%05d" % number, b"v") for number in range(20_000)])
    assert await turns_while_filled(batch) >= 20_000 // FILL_ROWS - 1


async def test_rows_that_are_made_later_are_made_in_turns_with_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slate, "FILL_NS", 0)
    keys = [b"%05d" % number for number in range(1_000)]
    made: list[bytes] = []
    seen: set[int] = set()

    def make() -> Iterator[tuple[bytes, bytes]]:
        for key in keys:
            made.append(key)
            yield key, b"v"

    async def other() -> None:
        while True:
            await asyncio.sleep(0)
            seen.add(len(made))

    beside = asyncio.create_task(other())
    batch = Batch()
    batch.put_later(make(), 1_000)
    batch.put(b"0 first", b"v")
    assert (len(batch), batch.size_bytes > 1_000, made) == (2, True, [])
    await database.commit(batch)
    beside.cancel()
    assert len(seen) >= len(keys) // FILL_ROWS
    found = [row async for page in database.scan(b"0", b"9") for row in page]
    assert found == [(b"0 first", b"v"), *((key, b"v") for key in keys)]


async def test_the_last_operation_on_a_key_wins_also_in_a_batch_filled_in_steps(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slate, "FILL_NS", 0)
    monkeypatch.setattr(slate, "FILL_ROWS", 5)
    keys = [b"%03d" % number for number in range(100)]
    batch = Batch()
    batch.put_all([(key, b"first") for key in keys])
    batch.put_all([(key, None) for key in keys[::2]])
    for key in keys[::4]:
        batch.put(key, b"last")
    for key in keys[::8]:
        batch.delete(key)
    await database.commit(batch)
    expected = dict.fromkeys(keys, b"first")
    for key in keys[::2]:
        del expected[key]
    expected.update(dict.fromkeys(keys[::4], b"last"))
    for key in keys[::8]:
        del expected[key]
    found = [row async for page in database.scan(b"0", b"9") for row in page]
    assert found == sorted(expected.items())


async def test_a_second_writer_fences_the_first(root: Root) -> None:
    old = await root.database("broker/0", Kind.BROKER)
    await old.commit(_batch((b"kept", b"1")))
    new = await root.database("broker/0", Kind.BROKER)

    with pytest.raises(Fenced):
        await old.commit(_batch((b"lost", b"1")))
    with pytest.raises(Fenced):  # and for ever
        await old.commit(_batch((b"lost", b"2")))
    assert isinstance(old.failed, Fenced)
    assert await asyncio.wait_for(old.wait_closed(), 60) == "fenced"
    await old.close()

    assert await new.get(b"kept", durable=True) == b"1"
    assert await new.get(b"lost") is None
    await new.commit(_batch((b"new", b"1")))
    await new.close()


@pytest.mark.slow
async def test_an_idle_writer_notices_that_it_was_fenced(root: Root) -> None:
    """Slow: SlateDB looks for a newer writer once a second."""
    old = await root.database("broker/0", Kind.BROKER)
    waiting = asyncio.create_task(old.wait_closed())
    new = await root.database("broker/0", Kind.BROKER)

    assert await asyncio.wait_for(waiting, 60) == "fenced"
    await old.close()
    await new.close()


async def test_a_closed_database_refuses_writes_and_says_so(root: Root) -> None:
    database = await root.database("broker/0", Kind.BROKER)
    await database.close()
    await database.close()

    assert database.closed_reason == "clean"
    with pytest.raises(StoreFailed):
        await database.commit(_batch((b"k", b"v")))
    with pytest.raises(StoreFailed):
        await database.get(b"k")


async def test_after_a_failed_write_the_database_stays_failed(tmp_path: Path) -> None:
    database = await open_root(tmp_path.as_uri(), timeout_s=60).database("broker/0", Kind.BROKER)
    await database.commit(_batch((b"k", b"v")))
    wal = tmp_path / "broker" / "0" / "wal"
    wal.rename(tmp_path / "moved")
    wal.write_text("a file where the folder was")

    with pytest.raises((StoreUnavailable, StoreFailed)) as caught:
        await asyncio.wait_for(database.commit(_batch((b"k", b"w"))), 120)
    assert database.failed is caught.value

    wal.unlink()
    (tmp_path / "moved").rename(wal)
    with pytest.raises(type(caught.value)):
        await database.commit(_batch((b"k", b"x")))


async def test_a_panic_in_a_write_fails_the_database_and_is_not_called_damage(
    tmp_path: Path,
) -> None:
    class Panicking(NoSync):
        async def sync(self) -> None:
            raise InternalError("range out of bounds")

    root = open_root(tmp_path.as_uri())
    root.durability = Panicking()
    database = await root.database("broker/0", Kind.BROKER)
    with pytest.raises(StoreFailed, match="range out of bounds"):
        await database.commit(_batch((b"k", b"v")))
    assert isinstance(database.failed, StoreFailed)
    await database.close()


async def test_a_panic_in_the_flush_behind_commits_is_repeated_and_the_database_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Panicking(NoSync):
        async def sync(self) -> None:
            panicked.set()
            raise InternalError("range out of bounds")

    panicked = asyncio.Event()
    tuning = replace(tuning_of(Kind.BROKER), replay=ReplayBound(1000, 0.01))
    database = await open_root(tmp_path.as_uri()).database("broker/0", Kind.BROKER, tuning)
    whole, database._durability = database._durability, Panicking()
    await database.commit(_batch((b"k", b"v")))
    async with asyncio.timeout(60):
        await panicked.wait()
        # Then the flush comes again
        panicked.clear()
        await panicked.wait()
    assert "flushing the memtable of broker/0: InternalError" in caplog.text

    # And commits go on, and the close, too
    await database.commit(_batch((b"k", b"w")))
    database._durability = whole
    await database.close()
    assert database.closed_reason == "clean"


async def test_a_panic_in_the_close_of_a_failed_database_is_not_raised(tmp_path: Path) -> None:
    class Panicking:
        def __init__(self, db: Any) -> None:
            self._db = db

        def __getattr__(self, name: str) -> Any:
            return getattr(self._db, name)

        async def shutdown_with_options(self, options: object) -> None:
            await self._db.shutdown_with_options(options)
            raise InternalError("range out of bounds")

    database = await open_root(tmp_path.as_uri()).database("broker/0", Kind.BROKER)
    database._fail(StoreFailed("the disk is broken"))
    database._db = Panicking(database._db)
    await database.close()


async def test_a_failed_database_closes_without_making_its_memory_durable(
    tmp_path: Path,
) -> None:
    class BrokenDisk(NoSync):
        async def sync(self) -> None:
            raise OSError(5, "Input/output error")

    root = open_root(tmp_path.as_uri())
    root.durability = BrokenDisk()
    database = await root.database("broker/0", Kind.BROKER)
    with pytest.raises(StoreFailed, match="Input/output error"):
        await database.commit(_batch((b"k", b"v")))
    await database.close()
    assert database.closed_reason == "clean"

    # What reads it afterwards learns why it is closed
    with pytest.raises(StoreFailed, match="Input/output error"):
        await database.get(b"k")
    with pytest.raises(StoreFailed, match="Input/output error"):
        _ = [rows async for rows in database.scan(b"a", b"z")]


async def test_the_tick_of_the_last_write_can_be_read_back(database: Database) -> None:
    before = int(time.time() * 1000)
    await database.commit(_batch((b"k", b"v")))
    written = await database.written_ms(b"k")
    assert written is not None
    assert before <= written <= int(time.time() * 1000)
    assert await database.written_ms(b"other") is None


@pytest.mark.parametrize(("bound", "behind"), [(3, True), (1000, False)])
async def test_the_memtable_is_flushed_behind_every_so_many_commits(
    tmp_path: Path, bound: int, behind: bool
) -> None:
    tuning = replace(tuning_of(Kind.INGEST), replay=ReplayBound(bound, 60))
    database = await open_root(tmp_path.as_uri()).database("ingest/0", Kind.INGEST, tuning)
    for number in range(9):
        await database.commit(_batch((b"k%d" % number, b"v")))

    def tables() -> int:
        return len(list((tmp_path / "ingest" / "0" / "compacted").glob("*.sst")))

    if behind:
        # While a flush is under way, more commits gather for the next one
        async with asyncio.timeout(60):
            while tables() <= 2:
                await database.commit(_batch((b"k", b"v")))
                await asyncio.sleep(0.01)
    await database.close()  # which flushes what is left, as the first commit does

    assert behind or tables() <= 2


@pytest.mark.parametrize("scheme", ["", "file", "s3"])
@pytest.mark.parametrize("kind", list(Kind))
def test_every_setting_is_one_that_slatedb_knows(kind: Kind, scheme: str) -> None:
    tuning = tuning_of(kind, scheme)
    table = tuning.settings
    found = json.loads(slatedb_settings(tuning).to_json_string())
    for name, value in table.items():
        at = found
        for part in name.split("."):
            at = at[part]
        assert at == value, name


@pytest.mark.usefixtures("watched_openings")
@pytest.mark.parametrize(("scheme", "count"), [("file", 30), ("s3", 40)])
async def test_one_compaction_takes_all_new_tables(tmp_path: Path, scheme: str, count: int) -> None:
    # Given tables of some flushes, which are there before the compactor first looks
    row, root = tuning_of(Kind.INGEST, scheme), open_root(tmp_path.as_uri())
    looks = (
        "compactor_options.poll_interval",
        "compactor_options.worker.compactions_poll_interval",
    )

    def with_looks(every: str) -> Tuning:
        quick = {**dict.fromkeys(looks, every), "manifest_poll_interval": "10ms"}
        settings = {**row.settings, **quick}
        return replace(row, replay=ReplayBound(1000, 60), settings=settings)

    database = await root.database("ingest/0", Kind.INGEST, with_looks("3600s"))
    for number in range(count):
        await database.commit(_batch((b"k", b"%d" % number)))
        await database.flush_memtable()
    await database.close()

    # When it looks
    database = await root.database("ingest/0", Kind.INGEST, with_looks("100ms"))
    seen = [database.statistics()]
    async with asyncio.timeout(60):
        while seen[-1].uncompacted_tables or not seen[-1].written_bytes["compaction"]:
            await asyncio.sleep(0.01)
            seen.append(database.statistics())

    # Then it leaves none behind for the next time
    assert {one.uncompacted_tables for one in seen} <= {0, count}
    assert await database.get(b"k") == b"%d" % (count - 1)
    await database.close()


@pytest.mark.parametrize("kind", list(Kind))
def test_fences_in_the_wal_are_never_collected(kind: Kind) -> None:
    settings = tuning_of(kind).settings
    assert settings["garbage_collector_options.wal_fence_options.dry_run"] is True
    assert settings["garbage_collector_options.boundary_files_enabled"] is True


async def test_manifests_of_a_folder_are_collected_again_and_again(tmp_path: Path) -> None:
    # Given a database in a folder, collected as often as can be
    row = tuning_of(Kind.INGEST, "file")
    options = "garbage_collector_options.{}_options.{}"
    often = {
        options.format(kind, name): value
        for kind in ("manifest", "compactions")
        for name, value in (("interval", "100ms"), ("min_age", "1ms"))
    }
    tuning = replace(row, replay=ReplayBound(1, 60), settings={**row.settings, **often})
    database = await open_root(tmp_path.as_uri()).database("ingest/0", Kind.INGEST, tuning)
    manifests = tmp_path / "ingest" / "0" / "manifest"

    async def oldest_after(oldest: str) -> str:
        while (found := min(path.name for path in manifests.iterdir())) <= oldest:
            await database.commit(_batch((b"k", b"v")))
            await asyncio.sleep(0.05)
        return found

    # When it goes on being written
    async with asyncio.timeout(60):
        first = await oldest_after("")
        second = await oldest_after(first)
        third = await oldest_after(second)

    # Then its old manifests go each time, not only the first
    assert first < second < third
    await database.close()


async def test_a_panic_of_slatedb_is_called_damage_and_a_long_wait_an_outage() -> None:
    with pytest.raises(DamagedStore, match="reading: range out of bounds"):
        async with bounded("reading", 60):
            raise InternalError("range out of bounds")
    with pytest.raises(StoreUnavailable, match=r"reading: no answer within 0\.01 s"):
        async with bounded("reading", 0.01):
            await asyncio.Event().wait()
