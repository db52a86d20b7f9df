"""Restoring archived dead letters: what a task says of what it cannot bring back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow as pa
import pytest

from libs.serving.limits import MEBIBYTE
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from services.broker.core.moves import moving
from services.janitor.jobs import dead_letter_jobs
from services.janitor.jobs.archive import DayFolder
from services.janitor.jobs.dead_letter_jobs import DeadLetterRestore, count_damaged_once
from services.janitor.jobs.owners import owners_of
from slatemq.errors import NotFound, SlateMQError, Unavailable
from slatemq.v1 import archived_pb2, archived_pb2_grpc
from tests.integration.client.ingest import refuse
from tests.unit.janitor.test_archive import AT, DAY, Waits, dead_letters, put_damaged

IDS = (1, 2)


def archived(ids: Sequence[int] = IDS) -> pa.Table:
    """What the table of archived dead letters has of them."""
    count = len(ids)
    return pa.table(
        {
            "queue": ["orders"] * count,
            "broker_shard": pa.array([0] * count, pa.int32()),
            "created_revision": [1] * count,
            "day": [DAY] * count,
            "message_id": list(ids),
            "failed_at": pa.array([AT] * count, pa.timestamp("us", "UTC")),
            "bucket_order": [1] * count,
            "run": ["run"] * count,
        }
    )


def restored(folder: Path, target: str = "", ids: Sequence[int] = IDS) -> dict[str, int]:
    (counts,) = DeadLetterRestore(folder.as_uri(), target)(iter(archived(ids).to_batches()))
    return {row["name"]: row["count"] for row in counts.to_pylist()}


def test_the_parts_that_are_damaged_are_named(tmp_path: Path) -> None:
    put_damaged(tmp_path, *IDS)

    counts = restored(tmp_path)

    damaged = "parts_damaged/queue=orders/day=2026-01-02/part-000001.parquet"
    assert counts == {"dead_letters_missing": 2, damaged: 1}
    named = count_damaged_once(Counter(counts) + Counter(counts))
    assert named == {"dead_letters_missing": 4, damaged: 1, "parts_damaged": 1}


class Taking(archived_pb2_grpc.ArchivedServiceServicer):
    """A broker that takes everything, and knows the message IDs of each request."""

    def __init__(self) -> None:
        self.requests: list[list[int]] = []

    async def RedriveArchived(  # noqa: N802 - the RPC's name
        self, request: archived_pb2.RedriveArchivedRequest, context: Any
    ) -> archived_pb2.RedriveArchivedResponse:
        self.requests.append([row.message_id for row in request.rows])
        return archived_pb2.RedriveArchivedResponse(redriven_count=len(request.rows))

    async def DropArchived(  # noqa: N802 - the RPC's name
        self, request: archived_pb2.DropArchivedRequest, context: Any
    ) -> archived_pb2.DropArchivedResponse:
        raise NotImplementedError


class Refusing(archived_pb2_grpc.ArchivedServiceServicer):
    """A broker that cannot restore anything."""

    def __init__(self, error: SlateMQError) -> None:
        self._error = error

    async def RedriveArchived(  # noqa: N802 - the RPC's name
        self, request: archived_pb2.RedriveArchivedRequest, context: Any
    ) -> archived_pb2.RedriveArchivedResponse:
        await refuse(context, self._error)
        return archived_pb2.RedriveArchivedResponse()

    async def DropArchived(  # noqa: N802 - the RPC's name
        self, request: archived_pb2.DropArchivedRequest, context: Any
    ) -> archived_pb2.DropArchivedResponse:
        return archived_pb2.DropArchivedResponse()


async def restored_without(folder: Path, lacking: str, target: str) -> dict[str, int]:
    broker = Refusing(NotFound("queue", lacking))
    return await restored_by(broker, folder, dead_letters(*IDS), target)


async def restored_by(
    broker: archived_pb2_grpc.ArchivedServiceServicer,
    folder: Path,
    letters: pa.Table,
    target: str = "",
) -> dict[str, int]:
    """What a task counts that archives these dead letters and restores them through this broker."""
    objects = open_root(folder.as_uri(), sync=False).objects
    await asyncio.to_thread(lambda: DayFolder(Waits(), objects, "orders", DAY).add(letters))
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
    archived_pb2_grpc.add_ArchivedServiceServicer_to_server(broker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    directory = TopologyDirectory(objects)
    try:
        await directory.announce(Peer("broker", 0, f"127.0.0.1:{port}", ""))
        ids = letters["message_id"].to_pylist()
        return await asyncio.to_thread(restored, folder, target, ids)
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


async def test_a_queue_that_moves_is_not_waited_for(tmp_path: Path) -> None:
    """The task would call for two minutes, and fail with all others of its job."""
    broker = Refusing(moving("orders"))

    counts = await restored_by(broker, tmp_path, dead_letters(*IDS), "elsewhere")

    assert counts == {"dead_letters_gone": 2, "dead_letters_missing": 0}


async def test_a_target_that_moves_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter_jobs, "owners_of", partial(owners_of, patience_s=0.0))
    broker = Refusing(moving("elsewhere"))

    with pytest.raises(Unavailable, match="queue 'elsewhere' is moving to another shard"):
        await restored_by(broker, tmp_path, dead_letters(*IDS), "elsewhere")


async def test_a_request_has_no_more_than_a_broker_takes_or_one_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given requests of 100 kB, and headers that count, too
    monkeypatch.setattr(dead_letter_jobs, "RESTORE_BYTES", 100_000)
    sizes = {1: 40_000, 2: 59_000, 3: 59_000, 4: 150_000, 5: 10}
    some = [dead_letters(one, payload=b"x" * size) for one, size in sizes.items()]
    letters = pa.concat_tables([*some, dead_letters(6, headers=[("h", "x" * 60_000)])])
    letters = pa.concat_tables([letters, dead_letters(7, headers=[("h", "y" * 60_000)])])

    broker = Taking()
    counts = await restored_by(broker, tmp_path, letters)

    assert counts["dead_letters_restored"] == 7
    assert broker.requests == [[1, 2], [3], [4], [5, 6], [7]]


async def test_the_largest_payload_that_an_instance_may_have_gets_through(tmp_path: Path) -> None:
    """The channel has no limit of its own: gRPC's would be for the default of the setting."""
    broker = Taking()
    counts = await restored_by(broker, tmp_path, dead_letters(1, payload=bytes(100 * MEBIBYTE)))

    assert (counts["dead_letters_restored"], broker.requests) == (1, [[1]])
