"""What is left of a removed shard is deleted, in both stores, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.objects.removed_shards import RemovedShards
from services.janitor.snapshots import refuse_unknown_shards
from slatemq.errors import Unavailable


async def test_the_files_of_one_shard_are_deleted_in_the_store_of_the_logs_too() -> None:
    root, wals = open_root("memory:///").objects, open_root("memory:///").objects
    for path in ("broker/1/manifest/1", "shard-owners/broker/1/1.json", "broker/11/wal/1"):
        await root.put(path, b"x")
    for path in ("broker/1/wal/1.sst", "broker/11/wal/1.sst"):
        await wals.put(path, b"x")
    removed = RemovedShards(root)
    await removed.add("broker/1", now_ms=7)

    await removed.delete_files("broker/1", wals)

    assert await removed.has("broker/1")
    assert await removed.all() == {"broker/1"}
    assert await root.list("broker") == ["broker/11/wal/1"]
    assert await root.list("shard-owners") == []
    assert await wals.list("broker") == ["broker/11/wal/1.sst"]


async def test_no_folder_of_a_removed_shard_is_left(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    for name in ("ingest/0", "ingest/1"):
        await (await root.database(name, Kind.INGEST)).close()
    # Of an upload that was killed: listings leave it out.
    (tmp_path / "ingest/0/wal/00000000000000000009.sst#1").touch()

    await RemovedShards(root.objects).delete_files("ingest/0", root.objects)

    assert await root.objects.folders("ingest") == ["ingest/1"]
    assert await root.objects.list("ingest/1")


async def test_jobs_need_no_snapshot_of_a_shard_that_was_removed(tmp_path: Path) -> None:
    root = open_root(tmp_path.as_uri())
    (tmp_path / "ingest/0/wal").mkdir(parents=True)  # Its deletion is not at its end.
    with pytest.raises(Unavailable, match="ingest/0 has a database"):
        await refuse_unknown_shards(root.objects, [])

    await RemovedShards(root.objects).add("ingest/0", now_ms=7)

    await refuse_unknown_shards(root.objects, [])
