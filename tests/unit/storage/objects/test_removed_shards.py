"""What is left of a removed shard is deleted, in both stores, and nothing else."""

from __future__ import annotations

from libs.storage.database.roots import open_root
from libs.storage.objects.removed_shards import RemovedShards


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
