"""A store for the write-ahead logs alone: whose it is, what its loss is, what is read from it."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from libs.storage.database.addresses import parse_root, parse_wal_store
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind, ReplayBound, tuning_of
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import (
    CorruptRecord,
    DamagedStore,
    Fenced,
    LostWalStore,
    OtherWalStore,
    StoreFailed,
)
from libs.storage.objects.instance_records import (
    InstanceRecord,
    InstanceRecords,
    WalStoreRecord,
    with_wal_store,
)
from libs.storage.objects.small_objects import Objects

NAME = "ingest/0"
KEY = b"\x01\x7fkey"


class Place:
    """An instance below a folder, whose logs are in another one."""

    def __init__(self, folder: Path) -> None:
        self.data, self.logs = folder / "data", folder / "logs"

    async def make(self) -> None:
        named = WalStoreRecord.new(self.logs.as_uri())
        records = InstanceRecords(open_root(self.data.as_uri()).objects)
        assert await records.create(InstanceRecord(1, 0, {}, named))

    def root(self, wal_url: str = "") -> Root:
        return open_root(self.data.as_uri(), wal_url)

    @property
    def wal(self) -> Path:
        return self.logs / NAME / "wal"


@pytest.fixture
async def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    await made.make()
    return made


async def commit(root: Root, value: bytes, *, flushed: bool = False) -> None:
    database = await root.database(NAME, Kind.INGEST)
    batch = Batch()
    batch.put(KEY, value)
    await database.commit(batch)
    if flushed:
        await database.flush_memtable()
    await database.close()


async def stored(root: Root) -> bytes | None:
    reader = await root.open_latest(NAME)
    value = await reader.get(KEY)
    await reader.close()
    return value


async def test_commits_are_in_the_store_of_the_logs_and_nowhere_else(place: Place) -> None:
    await commit(place.root(), b"1")

    assert sorted(one.name for one in place.data.iterdir()) == ["ingest", "instance"]
    assert not (place.data / NAME / "wal").exists()
    assert len(list(place.wal.iterdir())) > 1
    assert [one.name for one in (place.logs / NAME).iterdir()] == ["wal"]
    assert await stored(place.root()) == b"1"


async def test_a_second_owner_fences_the_first_across_both_stores(place: Place) -> None:
    def put(key: bytes) -> Batch:
        batch = Batch()
        batch.put(key, b"1")
        return batch

    old = await place.root().database(NAME, Kind.INGEST)
    await old.commit(put(b"\x01kept"))
    new = await place.root().database(NAME, Kind.INGEST)
    with pytest.raises(Fenced):
        await old.commit(put(b"\x01lost"))
    await old.close()
    assert await new.get_many([b"\x01kept", b"\x01lost"], durable=True) == [b"1", None]
    await new.close()


async def test_a_snapshot_and_its_files_need_no_store_of_the_logs(place: Place) -> None:
    root = place.root()
    database = await root.database(NAME, Kind.INGEST)
    batch = Batch()
    batch.put(KEY, b"1")
    await database.commit(batch)
    snapshot_id = await root.snapshots(database).take(60_000)
    await database.close()
    shutil.rmtree(place.logs)

    reader = await place.root().open_snapshot(NAME, snapshot_id)
    assert await reader.get(KEY) == b"1"
    await reader.close()
    assert (await place.root().snapshot_files(NAME, snapshot_id)).tables


async def test_an_empty_store_of_the_logs_is_not_taken_for_the_lost_one(place: Place) -> None:
    await commit(place.root(), b"1")
    shutil.rmtree(place.logs)
    with pytest.raises(LostWalStore, match="there is no folder"):
        await place.root().database(NAME, Kind.INGEST)

    place.logs.mkdir()
    for _ in range(2):
        with pytest.raises(LostWalStore, match=r"has no wal-store\.json"):
            await place.root().database(NAME, Kind.INGEST)
    assert list(place.logs.iterdir()) == []


@pytest.mark.parametrize("flushed", [False, True])
async def test_a_lost_log_is_named_by_its_store(place: Place, flushed: bool) -> None:
    await commit(place.root(), b"1", flushed=flushed)
    await place.root().objects.put("topology/ingest-0.json", b"{}")
    assert (await place.root().files(NAME)).faults == []
    shutil.rmtree(place.wal)

    with pytest.raises(DamagedStore) as raised:
        await place.root().database(NAME, Kind.INGEST)
    (fault,) = (await place.root().files(NAME)).faults
    assert fault.path.startswith(f"{place.logs.as_uri()}/{NAME}/wal/0000000000000000000")
    assert str(raised.value).startswith(f"{fault.path}: {fault.wrong}")


async def test_a_gap_and_a_damaged_file_in_the_log_are_found(place: Place) -> None:
    # Given an owner that was killed: a copy of what it has left, to which the record does not point
    database = await place.root().database(NAME, Kind.INGEST)
    for value in (b"1", b"2", b"3", b"4"):
        batch = Batch()
        batch.put(KEY, value)
        await database.commit(batch)
    data, logs = place.data.with_name("killed"), place.logs.with_name("killed-logs")
    shutil.copytree(place.logs, logs)
    shutil.copytree(place.data, data)
    await database.close()

    def root() -> Root:
        return open_root(data.as_uri(), logs.as_uri())

    assert await stored(root()) == b"4"
    files = await root().files(NAME)
    last = logs / NAME / "wal" / f"{files.wal[-1]:020}.sst"
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    fault = await root().wal_fault(NAME, files)
    assert fault is not None
    assert fault.path == last.as_uri()

    last.write_bytes(content)
    assert await root().wal_fault(NAME, files) is None
    (logs / NAME / "wal" / f"{files.wal[0]:020}.sst").unlink()
    assert len((await root().files(NAME)).faults) == 1
    with pytest.raises(DamagedStore, match="a commit is in it"):
        await root().database(NAME, Kind.INGEST)


async def test_logs_without_their_database_do_not_begin_a_new_one(place: Place) -> None:
    await commit(place.root(), b"1")
    shutil.rmtree(place.data / NAME / "manifest")
    shutil.rmtree(place.data / NAME / "compactions", ignore_errors=True)
    with pytest.raises(DamagedStore, match="ingest/0 has no manifest"):
        await place.root().database(NAME, Kind.INGEST)


async def test_logs_whose_rows_are_in_tables_are_collected_where_they_are(place: Place) -> None:
    wals = "garbage_collector_options.wal_options"
    usual = tuning_of(Kind.INGEST, "file", "file")
    quick = {**usual.settings, f"{wals}.interval": "200ms", f"{wals}.min_age": "1s"}
    database = await place.root().database(NAME, Kind.INGEST, replace(usual, settings=quick))
    written: set[str] = set()
    async with asyncio.timeout(60):
        while True:
            batch = Batch()
            batch.put(KEY, b"%d" % len(written))
            await database.commit(batch)
            await database.flush_memtable()
            there = {one.name for one in place.wal.iterdir()}
            if written - there:
                break
            written |= there
            await asyncio.sleep(0.2)
    await database.close()
    assert (await place.root().files(NAME)).faults == []
    assert await stored(place.root()) is not None


async def test_another_store_is_refused_whatever_it_has(place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    await other.make()
    await commit(other.root(), b"of the other")
    await commit(place.root(), b"1")

    with pytest.raises(OtherWalStore, match="has the WALs of another instance"):
        await place.root(other.logs.as_uri()).database(NAME, Kind.INGEST)
    (tmp_path / "empty").mkdir()
    with pytest.raises(OtherWalStore, match="is not the store that this instance has its WALs in"):
        await place.root((tmp_path / "empty").as_uri()).database(NAME, Kind.INGEST)
    assert list((tmp_path / "empty").iterdir()) == []
    assert await stored(place.root()) == b"1"


async def test_the_same_store_may_be_reached_by_another_url(place: Place, tmp_path: Path) -> None:
    await commit(place.root(), b"1")
    (tmp_path / "mounted").symlink_to(place.logs)
    place.logs.rename(tmp_path / "moved")
    (tmp_path / "mounted").unlink()
    assert await stored(place.root((tmp_path / "moved").as_uri())) == b"1"


async def test_of_a_new_instance_the_store_that_it_was_made_with_is_taken(
    place: Place, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(OtherWalStore):
        await place.root((tmp_path / "other").as_uri()).wal_store()
    assert list((tmp_path / "other").iterdir()) == []

    await place.root().wal_store()
    content = json.loads((place.logs / "wal-store.json").read_text())
    assert content["root"] == place.data.as_uri()


async def test_an_instance_with_its_logs_below_its_root_keeps_them_there(tmp_path: Path) -> None:
    place = Place(tmp_path)
    await commit(place.root(), b"1")
    await InstanceRecords(place.root().objects).create(InstanceRecord(1, 0, {}))
    with pytest.raises(OtherWalStore, match="leave the setting out"):
        await place.root(place.logs.as_uri()).database(NAME, Kind.INGEST)
    assert not place.logs.exists()
    assert await stored(place.root()) == b"1"


async def test_an_owner_notices_that_the_logs_were_moved_while_it_opened(place: Place) -> None:
    root = place.root()
    await root.check_wal_store()
    records = InstanceRecords(root.objects)
    moved = WalStoreRecord.new((place.logs / "new").as_uri())
    assert await records.create(InstanceRecord(2, 0, {}, moved))
    with pytest.raises(OtherWalStore, match="moved meanwhile"):
        await root.check_wal_store()


async def test_a_marker_that_is_none_is_damage(place: Place) -> None:
    await commit(place.root(), b"1")
    for content in (b"", b"[]", b"{}"):
        (place.logs / "wal-store.json").write_bytes(content)
        with pytest.raises(CorruptRecord, match=r"wal-store\.json"):
            await place.root().database(NAME, Kind.INGEST)


async def put_and_flush(database: Database, batch: Batch) -> None:
    await database.write(batch)
    await database.flush()


@pytest.mark.parametrize("alone", [True, False])
async def test_no_commit_is_durable_once_the_folder_of_the_logs_was_emptied(
    place: Place, alone: bool
) -> None:
    # Given an owner that has committed
    database = await place.root().database(NAME, Kind.INGEST)
    batch = Batch()
    batch.put(KEY, b"1")
    await database.commit(batch)

    # When all is removed from the folder, which stays
    for path in place.logs.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    # Then no later commit is taken for durable, in either of the two ways to make one so
    batch = Batch()
    batch.put(KEY, b"2")
    making = database.commit(batch) if alone else put_and_flush(database, batch)
    with pytest.raises(StoreFailed, match=r"wal-store\.json"):
        await making
    await database.close()


class CountedSync:
    """Counts syncs, and notes what they are of."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name = name
        self._calls = calls

    async def sync(self) -> None:
        self._calls.append(self._name)

    async def sync_file(self, path: Path) -> None:
        self._calls.append(self._name)


async def test_a_commit_syncs_the_logs_and_a_flush_both(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        "libs.storage.database.wal_stores.durability_of",
        lambda folder, sync: CountedSync("logs", calls),
    )
    root = place.root()
    root.durability = CountedSync("data", calls)
    database = await root.database(NAME, Kind.INGEST)
    assert calls[-2:] == ["data", "logs"]

    calls.clear()
    batch = Batch()
    batch.put(KEY, b"1")
    await database.commit(batch)
    assert calls[0] == "logs"
    await database.flush_memtable()
    assert calls[-2:] == ["data", "logs"]
    await database.close()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ftp://x", "unknown scheme"),
        ("s3://fast/prefix", "give the bucket alone, s3://fast"),
        ("memory:///", "keeps nothing"),
        ("s3://key:geheim@fast", "credentials belong in the environment"),
        ("s3://fast?secret_access_key=geheim", "unknown option"),
        ("s3://fast?s3_express=yes", "s3_express must be true or false"),
        ("s3://data", "it is the store of the root"),
    ],
)
def test_a_url_that_cannot_hold_logs_is_refused(url: str, complaint: str) -> None:
    with pytest.raises(ValueError, match="wal_store") as raised:
        open_root("s3://data/x?region=us-east-1", url)
    assert complaint in str(raised.value)
    assert "geheim" not in str(raised.value)


def test_logs_have_the_path_of_the_root_in_their_store() -> None:
    root = parse_root("s3://data/a/b")
    assert parse_wal_store("s3://fast", root).url == "s3://fast/a/b"
    assert parse_wal_store("file:///fast", root).url == "file:///fast/a/b"
    with pytest.raises(ValueError, match="it is the store of the root"):
        parse_wal_store("file:///data/logs", parse_root("file:///data"))


async def test_the_clients_of_both_libraries_take_the_option_of_express_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "geheim")
    root = open_root("memory:///")
    named = WalStoreRecord.new("s3://fast--use1-az4--x-s3?region=us-east-1&s3_express=true")
    wal = root.open_wal_store(named, make=False)
    assert isinstance(wal.objects, Objects)


def test_each_store_has_the_settings_that_its_requests_ask_for() -> None:
    collector = "garbage_collector_options.wal_options.interval"
    polls = "manifest_poll_interval"

    on_disk = tuning_of(Kind.INGEST, "s3", "file")
    assert (on_disk.settings[polls], on_disk.settings[collector]) == ("60s", "60s")
    assert on_disk.replay == ReplayBound(8192, 60)

    paid = tuning_of(Kind.INGEST, "file", "s3")
    assert (paid.settings[polls], paid.settings[collector]) == ("1s", "1200s")
    assert paid.replay == tuning_of(Kind.INGEST, "s3").replay
    assert not paid.settings["garbage_collector_options.boundary_files_enabled"]


def test_a_copied_record_has_the_store_of_the_copy_and_nothing_else_changes() -> None:
    path = "instance/00000000000000000003.json"
    data = json.dumps(
        {
            "number": 3,
            "written_at_ms": 5,
            "settings": {"purge_grace_s": 1},
            "wal_store": {"url": "file:///a", "id": "1"},
            "nonce": "8f",
        }
    ).encode()
    copied = with_wal_store(path, data, WalStoreRecord("file:///b", "2"))
    assert json.loads(copied) == {
        **json.loads(data),
        "wal_store": {"url": "file:///b", "id": "2"},
    }
    assert copied == with_wal_store(path, data, WalStoreRecord("file:///b", "2"))
    assert json.loads(with_wal_store(path, data, None))["wal_store"] is None
