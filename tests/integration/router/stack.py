"""An ingest and brokers that keep to the contract and nothing more, and routers between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from libs.serving.peers.channels import Channels
from libs.serving.peers.topology import TopologyDirectory
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root, open_root
from services.router.pieces import PieceLimits
from services.router.router import Router
from services.router.tails import Buffer
from tests.integration.router.peers import (
    LogMemory,
    MemoryBroker,
    MemoryIngest,
    Running,
    ShardMemory,
)

WAIT_SECONDS = 60


@asynccontextmanager
async def running_router(
    root: Root,
    limits: PieceLimits | None = None,
    buffer: Buffer | None = None,
    *,
    monotonic: Callable[[], float] = time.monotonic,
    look_again_ms: int = 50,
    number: int = 0,
) -> AsyncIterator[Router]:
    """A router that routes between all whom the topology of this root names."""
    directory = TopologyDirectory(root.objects, monotonic)
    channels = Channels(directory)
    router = Router(
        directory,
        channels,
        Telemetry(),
        limits=limits,
        buffer=buffer,
        look_again_ms=look_again_ms,
        number=number,
    )
    running = asyncio.create_task(router.run())
    try:
        yield router
        if running.done():
            running.result()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
        await channels.close()
        await directory.close()


class Stack:
    """Peers in one topology, and routers to be run between them."""

    def __init__(self, root: Path) -> None:
        self.root_url = root.as_uri()
        self.directory = TopologyDirectory(open_root(self.root_url).objects)
        self.log = LogMemory()
        self.shard = ShardMemory()
        self.ingest = MemoryIngest(self.log)
        self.broker = MemoryBroker(self.shard)
        self.ingest_server = Running(self.directory, self.ingest)
        self.broker_server = Running(self.directory, self.broker)

    def router(
        self, limits: PieceLimits | None = None, buffer: Buffer | None = None, *, number: int = 0
    ) -> AbstractAsyncContextManager[Router]:
        return running_router(open_root(self.root_url), limits, buffer, number=number)

    def got(self, queue_id: str) -> list[int]:
        return self.shard.assigned.get(queue_id, [])


@asynccontextmanager
async def peers(tmp_path: Path) -> AsyncIterator[Stack]:
    stack = Stack(tmp_path)
    await stack.ingest_server.start()
    await stack.broker_server.start()
    yield stack
    await stack.ingest_server.stop()
    await stack.broker_server.stop()
