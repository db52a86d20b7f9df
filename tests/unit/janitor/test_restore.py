"""Restoring archived dead letters: what a task says of what it cannot bring back."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow as pa
import pytest

from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from services.janitor.jobs.archive import DayFolder
from services.janitor.jobs.dead_letter_jobs import DeadLetterRestore, count_damaged_once
from slatemq.errors import NotFound
from slatemq.v1 import archived_pb2, archived_pb2_grpc
from tests.integration.client.ingest import refuse
from tests.unit.janitor.test_archive import AT, DAY, Waits, dead_letters, put_damaged

IDS = (1, 2)


def archived() -> pa.Table:
    """What the table of archived dead letters has of them."""
    count = len(IDS)
    return pa.table(
        {
            "queue": ["orders"] * count,
            "broker_shard": pa.array([0] * count, pa.int32()),
            "created_revision": [1] * count,
            "day": [DAY] * count,
            "message_id": list(IDS),
            "failed_at": pa.array([AT] * count, pa.timestamp("us", "UTC")),
            "bucket_order": [1] * count,
            "run": ["run"] * count,
        }
    )


def restored(folder: Path, target: str = "") -> dict[str, int]:
    (counts,) = DeadLetterRestore(folder.as_uri(), target)(iter(archived().to_batches()))
    return {row["name"]: row["count"] for row in counts.to_pylist()}


def test_the_parts_that_are_damaged_are_named(tmp_path: Path) -> None:
    put_damaged(tmp_path, *IDS)

    counts = restored(tmp_path)

    damaged = "parts_damaged/queue=orders/day=2026-01-02/part-000001.parquet"
    assert counts == {"dead_letters_missing": 2, damaged: 1}
    named = count_damaged_once(Counter(counts) + Counter(counts))
    assert named == {"dead_letters_missing": 4, damaged: 1, "parts_damaged": 1}


class Lacking(archived_pb2_grpc.ArchivedServiceServicer):
    """A broker without this queue."""

    def __init__(self, queue: str) -> None:
        self._queue = queue

    async def RedriveArchived(  # noqa: N802 - the RPC's name
        self, request: archived_pb2.RedriveArchivedRequest, context: Any
    ) -> archived_pb2.RedriveArchivedResponse:
        await refuse(context, NotFound("queue", self._queue))
        return archived_pb2.RedriveArchivedResponse()

    async def DropArchived(  # noqa: N802 - the RPC's name
        self, request: archived_pb2.DropArchivedRequest, context: Any
    ) -> archived_pb2.DropArchivedResponse:
        return archived_pb2.DropArchivedResponse()


async def restored_without(folder: Path, lacking: str, target: str) -> dict[str, int]:
    objects = open_root(folder.as_uri(), sync=False).objects
    await asyncio.to_thread(
        lambda: DayFolder(Waits(), objects, "orders", DAY).add(dead_letters(*IDS))
    )
    server = grpc.aio.server()
    archived_pb2_grpc.add_ArchivedServiceServicer_to_server(Lacking(lacking), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    directory = TopologyDirectory(objects)
    try:
        await directory.announce(Peer("broker", 0, f"127.0.0.1:{port}", ""))
        return await asyncio.to_thread(restored, folder, target)
    finally:
        await directory.close()
        await server.stop(None)


async def test_a_target_that_does_not_exist_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="elsewhere"):
        await restored_without(tmp_path, "elsewhere", target="elsewhere")


@pytest.mark.parametrize("target", ["", "orders", "elsewhere"])
async def test_dead_letters_of_a_queue_that_was_deleted_are_gone(
    tmp_path: Path, target: str
) -> None:
    counts = await restored_without(tmp_path, "orders", target)
    assert counts == {"dead_letters_gone": 2, "dead_letters_missing": 0}
