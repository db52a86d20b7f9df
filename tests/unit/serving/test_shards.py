"""How the owner of a shard opens its root, and how it ends."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from libs.serving.process.exits import EXIT_FAILED, EXIT_FENCED, EXIT_USAGE, FatalError
from libs.serving.process.shards import opened_root, wait_lost, watch_wal_store
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.database.wal_stores import MARKER
from libs.storage.errors import Fenced, LostWalStore, StoreUnavailable
from libs.storage.objects.instance_records import InstanceRecord, InstanceRecords, WalStoreRecord


def test_a_root_that_means_nothing_is_wrong_usage() -> None:
    with pytest.raises(FatalError) as ended:
        opened_root("nowhere://")
    assert ended.value.cause.code == EXIT_USAGE


async def test_an_owner_ends_when_another_takes_over_or_its_work_ends() -> None:
    root = open_root(f"memory:///{uuid4()}")
    older = await root.database("broker/0", Kind.BROKER)
    forever = asyncio.create_task(asyncio.Event().wait())
    ends = asyncio.create_task(asyncio.sleep(0))

    assert (await wait_lost(older, [forever, ends])).code == EXIT_FAILED

    lost = asyncio.create_task(wait_lost(older, [forever]))
    newer = await root.database("broker/0", Kind.BROKER)
    assert (await asyncio.wait_for(lost, 60)).code == EXIT_FENCED
    forever.cancel()
    await newer.close()


async def test_an_owner_whose_work_finds_out_first_ends_as_fenced() -> None:
    root = open_root(f"memory:///{uuid4()}")
    database = await root.database("broker/0", Kind.BROKER)

    async def commit() -> None:
        raise Fenced("making a commit durable: another process has opened this database")

    assert (await wait_lost(database, [asyncio.create_task(commit())])).code == EXIT_FENCED
    await database.close()


async def test_a_work_that_fails_says_why_the_database_is_closed() -> None:
    root = open_root(f"memory:///{uuid4()}")
    database = await root.database("broker/0", Kind.BROKER)
    closed = asyncio.Event()

    async def commit() -> None:
        await closed.wait()
        await asyncio.sleep(0.1)
        raise StoreUnavailable("the store refuses")

    lost = asyncio.create_task(wait_lost(database, [asyncio.create_task(commit())]))
    await asyncio.sleep(0)
    await database.close()
    closed.set()
    with pytest.raises(StoreUnavailable):
        await asyncio.wait_for(lost, 60)


async def test_what_a_work_raises_is_raised() -> None:
    root = open_root(f"memory:///{uuid4()}")
    database = await root.database("broker/0", Kind.BROKER)

    async def fail() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await wait_lost(database, [asyncio.create_task(fail())])
    await database.close()


async def commit(database: Database, key: bytes) -> None:
    batch = Batch()
    batch.put(key, b"value")
    await database.commit(batch)


async def test_an_owner_whose_bucket_of_wals_is_emptied_ends_and_keeps_what_it_answered() -> None:
    # Given an owner whose log is in a store of its own, a bucket
    root = open_root(f"memory:///{uuid4()}")
    named = WalStoreRecord.new("memory:///")
    assert await InstanceRecords(root.objects).create(InstanceRecord(1, 0, {}, named))
    database = await root.database("broker/0", Kind.BROKER)
    await commit(database, b"\x01first")  # which puts the rows of the start into tables
    await database.flush_memtable()
    await commit(database, b"\x01answered")
    watch = asyncio.create_task(watch_wal_store(root, database, look_s=0))
    await asyncio.sleep(0)

    # When that is emptied
    await (await root.wal_store()).objects.delete(MARKER)
    with pytest.raises(LostWalStore, match="has no wal-store"):
        await asyncio.wait_for(watch, 60)

    # Then no commit counts any more, and those that did are in tables
    with pytest.raises(LostWalStore):
        await commit(database, b"\x01late")
    await database.close()
    root.use_wal_store(root.own_wal_store())
    later = await root.database("broker/0", Kind.BROKER)
    assert await later.get(b"\x01answered", durable=True) == b"value"
    await later.close()


async def test_a_bucket_of_wals_that_is_down_ends_no_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    root = open_root(f"memory:///{uuid4()}")
    named = WalStoreRecord.new("memory:///")
    assert await InstanceRecords(root.objects).create(InstanceRecord(1, 0, {}, named))
    database = await root.database("broker/0", Kind.BROKER)
    objects, failed = (await root.wal_store()).objects, asyncio.Event()

    async def fail(path: str) -> bytes:
        failed.set()
        raise StoreUnavailable("the store refuses")

    objects.get = fail  # type: ignore[method-assign]
    watch = asyncio.create_task(watch_wal_store(root, database, look_s=0))
    await asyncio.wait_for(failed.wait(), 60)
    await commit(database, b"\x01key")
    assert not watch.done()
    assert "is not known: the store refuses" in caplog.text
    watch.cancel()
    await database.close()
