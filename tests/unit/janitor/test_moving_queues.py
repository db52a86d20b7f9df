"""Queues that move to another shard: they hold up neither looks, nor runs, nor other queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pyarrow as pa
import pytest

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import Peer, TopologyDirectory
from libs.storage.database.roots import open_root
from services.broker.core.moves import moving
from services.janitor.jobs.removing import EntryRemoval
from services.janitor.rpc.janitor import NamedQueues
from services.janitor.runs.change_detector import Ages, ChangeDetector
from services.janitor.runs.history import RunRequest
from slatemq.errors import NotFound, SlateMQError, Unavailable
from slatemq.v1 import entry_pb2_grpc, queue_pb2, queue_pb2_grpc, removal_pb2_grpc
from tests.integration.client.ingest import refuse

NOW_MS = 1_800_000_000_000


class Broker(
    queue_pb2_grpc.QueueServiceServicer,
    entry_pb2_grpc.EntryServiceServicer,
    removal_pb2_grpc.RemovalServiceServicer,
):
    """Lists one queue with a dead letter, and refuses all other calls about it."""

    def __init__(self, error: SlateMQError) -> None:
        self._error = error

    async def ListQueues(  # noqa: N802 - the RPC's name
        self, request: queue_pb2.ListQueuesRequest, context: Any
    ) -> queue_pb2.ListQueuesResponse:
        counts = queue_pb2.QueueCounts(failed_count=1)
        return queue_pb2.ListQueuesResponse(
            queues=[queue_pb2.Queue(queue_id="orders", counts=counts)]
        )

    async def refused(self, request: Any, context: Any) -> Any:
        await refuse(context, self._error)

    GetQueue = ListEntries = RemoveEntries = refused


@asynccontextmanager
async def broker(folder: Path, error: SlateMQError) -> AsyncIterator[TopologyDirectory]:
    server, servicer = grpc.aio.server(), Broker(error)  # type: ignore[abstract]
    queue_pb2_grpc.add_QueueServiceServicer_to_server(servicer, server)
    entry_pb2_grpc.add_EntryServiceServicer_to_server(servicer, server)
    removal_pb2_grpc.add_RemovalServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    directory = TopologyDirectory(open_root(folder.as_uri(), sync=False).objects)
    try:
        await directory.announce(Peer("broker", 0, f"127.0.0.1:{port}", ""))
        yield directory
    finally:
        await directory.close()
        await server.stop(None)


async def test_a_look_passes_over_it(tmp_path: Path) -> None:
    for error in (moving("orders"), NotFound("queue", "orders")):
        async with broker(tmp_path, error) as directory:
            objects, channels = open_root(tmp_path.as_uri()).objects, Channels(directory)
            detector = ChangeDetector(directory, channels, objects, Ages(0, 1, 0))
            assert await detector.look("dead-letters", NOW_MS) == {}
            await channels.close()


async def test_a_run_may_name_it(tmp_path: Path) -> None:
    async with broker(tmp_path, moving("orders")) as directory:
        channels = Channels(directory)
        queues = NamedQueues(directory, channels)
        await queues.check(RunRequest("done", queue_ids=("orders",)))
        # The error may be about another one.
        with pytest.raises(Unavailable):
            await queues.check(RunRequest("done", queue_ids=("bills",)))
        await channels.close()


async def test_its_entries_are_gone_and_not_waited_for(tmp_path: Path) -> None:
    rows = {
        "queue": ["orders"],
        "broker_shard": [0],
        "created_revision": [1],
        "message_id": [1],
        "failed_at_ms": [1],
        "bucket_order": [1],
    }

    def removed() -> list[dict[str, Any]]:
        removal = EntryRemoval(tmp_path.as_uri(), failed=True)
        (counts,) = removal(iter(pa.table(rows).to_batches()))
        return counts.to_pylist()  # type: ignore[no-any-return]

    async with broker(tmp_path, moving("orders")):
        found = await asyncio.to_thread(removed)

    assert {row["name"]: row["count"] for row in found} == {
        "failed_removed": 0,
        "failed_gone": 1,
        "failed_refused": 0,
    }
