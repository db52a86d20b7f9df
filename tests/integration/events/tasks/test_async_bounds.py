"""What publishes hold while a queue backend or the store is slow: it is counted, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from libs.serving.peers.channels import open_channel
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.objects.small_objects import Objects
from services.ingest.config import IngestConfig
from slatemq.errors import ResourceExhausted
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.tasks.queued_ingest import (
    LARGE,
    QueuedIngest,
    queue_settings,
    until_connected,
)
from tests.integration.ingest.server import Server
from tests.integration.waiting import eventually

pytestmark = pytest.mark.slow  # A real server.

PAYLOAD = bytes(100_000)
BYTES_MAX = 5 * len(PAYLOAD)


@asynccontextmanager
async def paused(port: int) -> AsyncIterator[None]:
    """The server answers no writes meanwhile."""
    async with Redis(port=port) as redis:
        await redis.client_pause(60_000, all=False)
        try:
            yield
        finally:
            await redis.client_unpause()


async def test_publishes_that_wait_for_a_slow_backend_are_counted_and_bounded(
    tmp_path: Path,
) -> None:
    with running(RedisServer(tmp_path, "streams")) as redis:
        settings = queue_settings("redis", redis)
        config = IngestConfig(root="memory:///", queue=settings, uncommitted_bytes_max=BYTES_MAX)
        server = Server(config, Telemetry())
        await server.start()
        try:
            async with open_channel(server.address) as channel:
                ingest = QueuedIngest(channel)
                await until_connected(ingest)
                async with paused(redis.port):
                    # When more is published than may wait
                    publishes = [asyncio.create_task(ingest.send_task(PAYLOAD)) for _ in range(10)]
                    async with asyncio.timeout(60):
                        while sum(publish.done() for publish in publishes) < 6:
                            await asyncio.sleep(0.01)

                    # Then what fits waits, and the others are refused as direct ones are
                    held_bytes = server.service.held_bytes
                    assert 4 * len(PAYLOAD) <= held_bytes <= BYTES_MAX
                    refused = [one.exception() for one in publishes if one.done()]
                    for error in refused:
                        assert isinstance(error, ResourceExhausted)
                        assert error.reason == "UNCOMMITTED_BYTES"

                # And once the backend answers, those that waited are tasks, and others are taken
                done = await asyncio.gather(*publishes, return_exceptions=True)
                task_ids = [one for one in done if isinstance(one, str)]
                assert len(task_ids) == len(publishes) - len(refused)
                for task_id in (*task_ids, await ingest.send_task(PAYLOAD)):
                    await ingest.applied(task_id)
                # What the last one held goes a moment after its answer
                async with asyncio.timeout(60):
                    while server.service.held_bytes:
                        await asyncio.sleep(0.01)
        finally:
            await server.stop()


class HangingBodies(Objects):
    """A real store that takes no body of a task before the gate is open.

    Attributes:
        waiting_count: How many wait.
    """

    def __init__(self, objects: Objects) -> None:
        vars(self).update(vars(objects))
        self.gate = asyncio.Event()
        self.waiting_count = 0

    async def put(self, path: str, data: bytes) -> None:
        if path.startswith("tasks/"):
            self.waiting_count += 1
            await self.gate.wait()
        await super().put(path, data)


async def test_publishes_whose_bodies_wait_for_the_store_hold_up_no_smaller_ones(
    tmp_path: Path,
) -> None:
    root = open_root("memory:///")
    root.objects = store = HangingBodies(root.objects)
    with running(RedisServer(tmp_path, "streams")) as redis:
        settings = queue_settings("redis", redis)
        bytes_max = 2 * len(LARGE) + 10_000
        config = IngestConfig(root=root.url, queue=settings, uncommitted_bytes_max=bytes_max)
        server = Server(config, Telemetry(), root)
        await server.start()
        try:
            async with open_channel(server.address) as channel:
                ingest = QueuedIngest(channel)
                await until_connected(ingest)
                # Given as many large publishes as may wait for a store that hangs
                large = [asyncio.create_task(ingest.send_task(LARGE)) for _ in range(2)]
                await eventually(lambda: store.waiting_count == len(large))
                assert server.service.held_bytes >= len(large) * len(LARGE)

                # When smaller ones come, then they are answered
                small = [await ingest.send_task(PAYLOAD) for _ in range(5)]

                # And a further large one is refused, since the store is what it would wait for
                with pytest.raises(ResourceExhausted) as refused:
                    await ingest.send_task(LARGE)
                assert refused.value.reason == "UNCOMMITTED_BYTES"
                assert "the store" in str(refused.value)

                # And all are applied once the store takes bodies
                store.gate.set()
                for task_id in (*small, *await asyncio.gather(*large)):
                    await ingest.applied(task_id)
        finally:
            store.gate.set()
            await server.stop()
