"""The write-ahead logs of an instance, moved between stores; how it goes on where they are lost."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import DamagedStore, LostWalStore, OtherWalStore, StorageError
from libs.storage.layout.ids import SeqBlock, decode_seq_block, encode_seq_block
from libs.storage.layout.own_keys import CLOCK_KEY, ID_BLOCK_KEY
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords, WalStoreRecord
from libs.storage.objects.removed_shards import RemovedShards
from services.janitor.backup.catalogue import Catalogue
from services.janitor.backup.renumbering import LEFT_OUT_MIN
from services.janitor.backup.restoring import Restoring
from services.janitor.backup.shards import snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.moving.command import main
from services.janitor.moving.wals import WalMove
from services.janitor.runs.history import RunStore
from services.janitor.verify.command import verify_stopped
from slatemq.errors import FailedPrecondition
from tests.integration.storage.s3_servers import CREDENTIALS, make_bucket, moto

KINDS = {"broker/0": Kind.BROKER, "ingest/0": Kind.INGEST}
ROW = b"\x01\x7f"


class Places(NamedTuple):
    """URLs of a root, and of stores for its WALs."""

    root: str
    first: str
    second: str


def in_folders(folder: Path) -> Places:
    return Places(*((folder / name).as_uri() for name in ("data", "first", "second")))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture(params=["file beside file", "s3 beside file", "file beside s3"])
def places(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Places:
    files = in_folders(tmp_path)
    if request.param == "file beside file":
        return files
    port = request.getfixturevalue("port")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    options = f"endpoint=http://127.0.0.1:{port}&region=us-east-1&allow_http=true"
    prefix = tmp_path.name
    if request.param == "s3 beside file":
        return Places(f"s3://queues/{prefix}?{options}", files.first, files.second)
    # Roots in folders have no prefix: the bucket of their WALs is one instance's.
    return Places(files.root, f"s3://{make_bucket(port, f'{prefix}-1')}?{options}", files.second)


def row(value: bytes) -> Batch:
    batch = Batch()
    batch.put(ROW, value)
    batch.put(CLOCK_KEY, bytes(8))
    batch.put(ID_BLOCK_KEY, encode_seq_block(SeqBlock(5000, 1)))
    return batch


async def make(root: Root, wal_url: str = "") -> None:
    named = WalStoreRecord.new(wal_url) if wal_url else None
    assert await InstanceRecords(root.objects).create(InstanceRecord(1, 0, {}, named))
    for name, kind in KINDS.items():
        database = await root.database(name, kind)
        await database.commit(row(b"1"))
        await database.flush_memtable()
        await database.commit(row(b"2"))
        await leave(database)


async def leave(database: Database) -> None:
    """End as a process that is killed does: what is in the log alone stays there."""
    database.failed = DamagedStore("killed")
    await database.close()


async def read(root: Root, name: str) -> bytes | None:
    reader = await root.open_latest(name)
    value = await reader.get(ROW)
    await reader.close()
    return value


async def move(places: Places, to: str, *, is_lost: bool = False) -> None:
    await WalMove(open_root(places.root), open_root(places.root, to), is_lost).move()


async def test_wals_move_from_the_root_and_on_and_nothing_is_lost(places: Places) -> None:
    await make(open_root(places.root))
    for to in (places.first, places.second):
        await move(places, to)
        wal = await open_root(places.root).wal_store()
        assert wal.record is not None
        assert wal.record.url == to
        for name, kind in KINDS.items():
            assert await read(open_root(places.root), name) == b"2"
            database = await open_root(places.root).database(name, kind)
            await database.commit(row(b"2"))
            await leave(database)
    with pytest.raises(OtherWalStore):
        await move(places, places.first)  # it has what a frozen owner must find


async def test_a_move_that_was_cut_off_lets_no_process_start_and_goes_on(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(open_root(places.root))

    class Cut(Exception):
        pass

    real = Root.database
    left = 0
    for step in range(1, 5):
        left = step

        async def cut(self: Root, *given: Any, **named: Any) -> Database:
            nonlocal left
            left -= 1
            if not left:
                raise Cut
            return await real(self, *given, **named)

        with monkeypatch.context() as patched:
            patched.setattr(Root, "database", cut)
            with pytest.raises(Cut):
                await move(places, places.first)
        with pytest.raises(LostWalStore):
            await open_root(places.root).database("ingest/0", Kind.INGEST)
    await move(places, places.first)
    for name in KINDS:
        assert await read(open_root(places.root), name) == b"2"


async def test_an_owner_that_runs_on_loses_nothing_that_it_has_answered(places: Places) -> None:
    await make(open_root(places.root))
    owner = await open_root(places.root).database("ingest/0", Kind.INGEST)
    await owner.commit(row(b"answered"))
    await move(places, places.first)
    with pytest.raises(StorageError):
        await owner.commit(row(b"not answered"))
    await owner.close()
    assert await read(open_root(places.root), "ingest/0") == b"answered"


async def test_a_lost_store_is_left_behind_with_what_it_had_and_numbers_are_left_out(
    tmp_path: Path,
) -> None:
    places = in_folders(tmp_path)
    await make(open_root(places.root), places.first)
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(LostWalStore):
        await move(places, places.second)
    with pytest.raises(LostWalStore):
        await open_root(places.root).database("ingest/0", Kind.INGEST)

    await move(places, places.second, is_lost=True)
    for name in KINDS:
        assert await read(open_root(places.root), name) == b"1"
    reader = await open_root(places.root).open_latest("ingest/0")
    block = decode_seq_block(await reader.get(ID_BLOCK_KEY) or b"")
    await reader.close()
    assert block.end >= 5000 + LEFT_OUT_MIN


async def test_a_shard_that_was_removed_begins_no_log(tmp_path: Path) -> None:
    places = in_folders(tmp_path)
    root = open_root(places.root)
    await make(root, places.first)
    # Its folder stays, empty, where the root is one.
    await RemovedShards(root.objects).add("broker/7", now_ms=0)
    (tmp_path / "data/broker/7").mkdir()
    shutil.rmtree(tmp_path / "first")
    await move(places, places.second, is_lost=True)
    assert await root.objects.list("broker/7") == []


async def test_an_emptied_store_may_be_the_new_one(tmp_path: Path) -> None:
    places = in_folders(tmp_path)
    await make(open_root(places.root), places.first)
    shutil.rmtree(tmp_path / "first")
    await move(places, places.first, is_lost=True)
    assert await read(open_root(places.root), "ingest/0") == b"1"


async def test_wals_at_the_root_are_not_given_up_and_other_stores_not_taken(
    tmp_path: Path,
) -> None:
    places = in_folders(tmp_path)
    with pytest.raises(FailedPrecondition, match="no instance"):
        await move(places, places.first)
    await make(open_root(places.root))
    with pytest.raises(FailedPrecondition, match="below its root"):
        await move(places, places.first, is_lost=True)

    other = (tmp_path / "other").as_uri()
    await make(open_root(other), places.first)
    with pytest.raises(OtherWalStore):
        await move(places, places.first)
    assert await read(open_root(places.root), "ingest/0") == b"2"
    assert await read(open_root(other), "ingest/0") == b"2"


def test_the_command_says_what_is_wrong_with_its_urls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    root = ["move-wals", "--root", data.as_uri(), "--to"]
    assert main([*root, "file:///tmp/x"], {}) == 2
    data.mkdir()
    assert main([*root, "s3://key:geheim@fast"], {}) == 2
    assert main([*root, data.as_uri()], {}) == 2
    assert main([*root, (tmp_path / "logs").as_uri()], {}) == 1
    said = capsys.readouterr().err
    assert "there is no folder" in said
    assert "credentials belong in the environment" in said
    assert "it is the store of the root" in said
    assert "there is no instance" in said
    assert "geheim" not in said


async def test_a_backup_of_a_stopped_instance_has_its_log_and_is_restored_with_another(
    places: Places, tmp_path: Path
) -> None:
    source = open_root(places.root)
    await make(source, places.first)
    backups = open_root((tmp_path / "backups").as_uri())
    taking = Taking(
        BackupSource(source, lambda: snapshots_of_stopped(source, 1), RunStore(source.objects)),
        backups,
        kept=1,
    )
    backup = await taking.take()

    for name, wal_url in (("with", (tmp_path / "logs").as_uri()), ("without", "")):
        url = (tmp_path / name).as_uri()
        await Restoring(Catalogue(backups.objects), backup, open_root(url, wal_url)).restore()
        wal = await open_root(url).wal_store()
        assert (wal.record.url if wal.record else "") == wal_url
        for database in KINDS:
            assert await read(open_root(url), database) == b"2"
        if wal_url:
            assert not (tmp_path / name / "ingest/0/wal").exists()


async def test_verifying_a_stopped_instance_reads_its_log_where_it_is(tmp_path: Path) -> None:
    places = in_folders(tmp_path)
    await make(open_root(places.root), places.first)
    before = await verify_stopped(open_root(places.root))
    assert not [one for one in before.all() if one.record in ("file", "manifest")]

    shutil.rmtree(tmp_path / "first/broker/0/wal")
    after = await verify_stopped(open_root(places.root))
    (fault,) = (one for one in after.all() if one.record == "file")
    assert fault.key.startswith(f"{places.first}/broker/0/wal/")
