"""A restore that was interrupted: no process takes what is there for an instance."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from obstore.store import LocalStore

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from libs.storage.errors import OtherWalStore, StoreUnavailable, UnfinishedRestore
from libs.storage.layout.keys import config_key, queue_state_key
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords
from libs.storage.objects.queue_names import QueueNames
from libs.storage.objects.restores import RESTORING
from libs.storage.objects.small_objects import Objects
from libs.storage.records.configs import QueueConfigRecord, encode_config
from libs.storage.records.states import QueueStateRecord, encode_queue_state
from services.janitor.backup.catalogue import Catalogue
from services.janitor.backup.restoring import Restoring
from services.janitor.verify.command import verify_stopped
from tests.integration.janitor.backup.stopped_instance import read, restored, taking, write


class Interrupted(Exception):
    """As after Ctrl-C."""


class InterruptedObjects(Objects):
    """Interrupts before a path is written that begins so."""

    def __init__(self, root: Root, at: str) -> None:
        assert root.address.folder is not None
        super().__init__(LocalStore(root.address.folder, mkdir=True), None, root.durability)
        self._at = at

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        if path.startswith(self._at):
            raise Interrupted
        return await super().put_if_absent(path, data)

    async def delete(self, path: str) -> None:
        if path.startswith(self._at):
            raise Interrupted
        await super().delete(path)


@pytest.fixture
async def source(root: Root) -> Root:
    """An instance with a queue."""
    await InstanceRecords(root.objects).create(InstanceRecord(1, 1, {"purge_grace_s": 77}))
    await write(root, b"x")
    database = await root.database("broker/0", Kind.BROKER)
    state = QueueStateRecord(1, False, 0, (), 1, 0, 0, 0, 0, 0, 0, ())
    batch = Batch()
    batch.put(config_key("orders"), encode_config(QueueConfigRecord("true", 5, 0)))
    batch.put(queue_state_key("orders"), encode_queue_state(state))
    await database.commit(batch)
    await database.close()
    return root


async def interrupt(backups: Root, fresh: Root, at: str, wal_url: str = "") -> None:
    target = open_root(fresh.url, wal_url, sync=False)
    target.objects = InterruptedObjects(target, at)
    with pytest.raises(Interrupted):
        await restored(backups, target)


@pytest.mark.parametrize(
    "at", ["broker/0/manifest/", "ingest/0/manifest/", "queue-names/", "instance/", RESTORING]
)
async def test_no_database_of_it_is_opened_until_it_was_repeated(
    source: Root, backups: Root, fresh: Root, at: str
) -> None:
    await taking(source, backups).take()
    await interrupt(backups, fresh, at)

    for name, kind in (("broker/0", Kind.BROKER), ("ingest/0", Kind.INGEST)):
        with pytest.raises(UnfinishedRestore, match=r"repeat it .*or empty the root"):
            await open_root(fresh.url, sync=False).database(name, kind)
    with pytest.raises(UnfinishedRestore):
        await verify_stopped(open_root(fresh.url, sync=False))

    await restored(backups, fresh)
    assert [await read(fresh, name) for name in ("broker/0", "ingest/0")] == [b"x", b"x"]
    assert (await QueueNames(fresh.objects).get("orders")).broker_shards == (0,)
    record = await InstanceRecords(fresh.objects).latest()
    assert record is not None
    assert record.settings == {"purge_grace_s": 77}


async def test_no_process_starts_and_makes_an_instance_of_it(
    source: Root, backups: Root, fresh: Root
) -> None:
    await taking(source, backups).take()
    await interrupt(backups, fresh, "instance/")

    command = [sys.executable, "-m", "services.ingest", "--root", fresh.url]
    ports = ["--port", "0", "--peer-port", "0"]
    ended = await asyncio.to_thread(
        subprocess.run, [*command, *ports], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, "repeat it" in ended.stderr) == (1, True), ended.stderr
    assert await InstanceRecords(fresh.objects).latest() is None
    await restored(backups, fresh)


async def test_objects_that_were_copied_ahead_are_no_instance(
    source: Root, backups: Root, fresh: Root
) -> None:
    backup = await taking(source, backups).take()
    target = open_root(fresh.url, sync=False)
    await Restoring(Catalogue(backups.objects), backup, target, prepare=True).restore()

    with pytest.raises(UnfinishedRestore):
        await fresh.database("broker/0", Kind.BROKER)


async def wal_url_of(fresh: Root) -> str:
    """Where a restored instance has its WALs; empty: below its root."""
    root = open_root(fresh.url, sync=False)
    assert await read(root, "ingest/0") == b"x"
    record = (await root.wal_store()).record
    return "" if record is None else record.url


async def test_a_restore_is_bound_to_no_store_that_cannot_have_its_wals(
    source: Root, backups: Root, fresh: Root, tmp_path: Path
) -> None:
    await taking(source, backups).take()
    # Given a URL where no folder can be, and the store of another instance
    (tmp_path / "file").touch()
    used, free = (tmp_path / "used").as_uri(), (tmp_path / "free").as_uri()
    await restored(backups, open_root((tmp_path / "other").as_uri(), used, sync=False))

    # When the instance is restored with either, then it has not begun
    with pytest.raises(StoreUnavailable, match="making the folder of the WALs"):
        await restored(backups, open_root(fresh.url, (tmp_path / "file/wal").as_uri(), sync=False))
    with pytest.raises(OtherWalStore, match="an empty store"):
        await restored(backups, open_root(fresh.url, used, sync=False))
    assert not await fresh.objects.exists(RESTORING)

    await restored(backups, open_root(fresh.url, free, sync=False))
    assert await wal_url_of(fresh) == free


@pytest.mark.parametrize("name", ["first", "second", ""])
async def test_until_there_are_databases_a_repeat_says_where_the_wals_are(
    source: Root, backups: Root, fresh: Root, tmp_path: Path, name: str
) -> None:
    backup = await taking(source, backups).take()
    target = open_root(fresh.url, (tmp_path / "first").as_uri(), sync=False)
    await Restoring(Catalogue(backups.objects), backup, target, prepare=True).restore()

    chosen = (tmp_path / name).as_uri() if name else ""
    await restored(backups, open_root(fresh.url, chosen, sync=False))

    assert await wal_url_of(fresh) == chosen


@pytest.mark.parametrize("name", ["first", ""])
async def test_once_there_are_databases_a_repeat_has_the_wals_where_they_are(
    source: Root, backups: Root, fresh: Root, tmp_path: Path, name: str
) -> None:
    await taking(source, backups).take()
    begun = (tmp_path / name).as_uri() if name else ""
    await interrupt(backups, fresh, "instance/", begun)
    (tmp_path / "second").mkdir()

    with pytest.raises(OtherWalStore, match=r"is not the store|below its root"):
        await restored(backups, open_root(fresh.url, (tmp_path / "second").as_uri(), sync=False))
    assert not [*(tmp_path / "second").iterdir()]

    await restored(backups, open_root(fresh.url, sync=False))
    assert await wal_url_of(fresh) == begun
