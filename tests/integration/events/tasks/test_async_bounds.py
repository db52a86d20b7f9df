"""What publishes hold while a queue backend is slow: it is counted, and bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from libs.serving.peers.channels import open_channel
from libs.serving.telemetry import Telemetry
from services.ingest.config import IngestConfig
from slatemq.errors import ResourceExhausted
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.tasks.queued_ingest import (
    QueuedIngest,
    queue_settings,
    until_connected,
)
from tests.integration.ingest.server import Server

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
