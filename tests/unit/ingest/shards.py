"""A shard opened without a server, with what a test wants to hold in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from libs.storage.database.roots import Root, open_root
from libs.storage.objects.shard_owners import Owner
from libs.storage.objects.small_objects import Objects
from services.ingest import wire
from services.ingest.batches import Accepted
from services.ingest.config import IngestConfig
from services.ingest.shard import Shard, open_shard
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from tests.configs import config_of
from tests.manual_clock import ManualClock


class GatedObjects(Objects):
    """A real store whose writes below `blobs/` wait for the gate."""

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.gate = asyncio.Event()
        self.writes = 0

    async def put(self, path: str, data: bytes) -> None:
        self.writes += 1
        await self.gate.wait()
        await super().put(path, data)


@asynccontextmanager
async def opened(
    root: Root | None = None, clock: ManualClock | None = None, **settings: Any
) -> AsyncIterator[Shard]:
    chosen = root or open_root("memory:///")
    config = config_of(IngestConfig, root=chosen.url, **settings)
    if clock is None:
        shard = await open_shard(chosen, config, Owner())
    else:
        manual = clock
        shard = await open_shard(chosen, config, Owner(), lambda last_ms: manual)
    try:
        yield shard
    finally:
        await shard.close()


def batch(*payloads: bytes, request_id: str = "", **headers: str) -> Accepted:
    messages = [PublishRun(payloads=[payload], headers=headers) for payload in payloads]
    return accepted(*messages, request_id=request_id)


def accepted(*messages: PublishRun, request_id: str = "") -> Accepted:
    request = PublishRequest(runs=messages, request_id=request_id)
    return wire.accept(request, wire.Rules(64 << 20, 3600, 900_000))


async def sequences(shard: Shard, after: int = 0) -> list[int]:
    """The sequences of the log, as a tailer gets them, up to where it ends now."""
    end = shard.log.end.sequence
    found: list[int] = []
    async with aclosing(shard.log.tail(after)) as updates:
        async for update in updates:
            found += [sequence for sequence, _ in update.entries]
            if not found or found[-1] >= end:
                return found
    raise AssertionError("a tail has no end")
