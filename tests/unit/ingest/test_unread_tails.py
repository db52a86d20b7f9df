"""Tails that nobody reads: each takes a share of the memory for answers."""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing
from typing import Any

from libs.serving.peers.topology import TopologyDirectory
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.ingest.config import IngestConfig
from services.ingest.rpc.ingest import IngestServicer
from slatemq.v1 import ingest_pb2
from tests.unit.ingest.shards import batch, opened

TAILS = 40

ENTRIES = 40
HEADER_BYTES = 60_000


async def test_tails_that_are_not_read_refuse_no_others() -> None:
    root = open_root("memory:///")
    config = IngestConfig(root=root.url, answers_bytes_max=1 << 20)
    servicer = IngestServicer(config, TopologyDirectory(root.objects), Telemetry())
    async with opened(root) as shard, AsyncExitStack() as unread:
        servicer.shard = shard
        for _ in range(ENTRIES):
            await shard.publisher.publish(batch(b"", header="v" * HEADER_BYTES))

        # When tails from the beginning hold an update each, together more than there may be
        for _ in range(TAILS):
            tail: Any = servicer.TailLog(ingest_pb2.TailLogRequest(), None)
            update = await anext(await unread.enter_async_context(aclosing(tail)))
            assert update.entries
        assert servicer.held_bytes > config.answers_bytes_max

        # Then the next one, which is read, gets all
        tail = servicer.TailLog(ingest_pb2.TailLogRequest(), None)
        count = 0
        async with aclosing(tail) as updates:
            while count < ENTRIES:
                count += len((await anext(updates)).entries)
    assert servicer.held_bytes == 0
