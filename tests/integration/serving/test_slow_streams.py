"""Large messages on streams that come slowly and never whole: what they cost a real process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.forms import proof
from tests.integration.serving.test_large_requests import (
    MEBIBYTE,
    PUBLISH_STREAM,
    channel,
    serving,
)
from tests.slow_streams import slow_streams

CONSUME = "/slatemq.v1.ConsumerService/Consume"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

PAUSE_S = 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "path"),
    [("ingest", PUBLISH_STREAM), proof("broker", CONSUME), proof("router", REFLECTION)],
)
async def test_messages_that_grow_slowly_on_streams_are_bounded_in_memory(
    tmp_path: Path, kind: str, path: str
) -> None:
    """Slow: what counts as slow takes its time. The bound is README.md's, over that at rest."""
    async with serving(kind, tmp_path) as there, channel(there.address) as opened:
        before = there.resident
        health: Any = health_pb2_grpc.HealthStub(opened)

        async def given_back() -> None:
            async with asyncio.timeout(30):
                while there.resident > before + 64 * MEBIBYTE:
                    await asyncio.sleep(PAUSE_S)

        # When more comes on streams than there is memory for, and none of it is a whole message
        async with slow_streams(there.address, path) as streams:
            async with asyncio.timeout(120):
                while not all(stream.is_ended for stream in streams):
                    # Then others are served
                    await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
                    await asyncio.sleep(PAUSE_S)
            # And the streams are ended in time, and their memory is given back without another call
            assert there.peak - before < 1024 * MEBIBYTE
            await given_back()

        # And so is that of streams whose clients go before
        async with slow_streams(there.address, path), asyncio.timeout(60):
            while there.resident < before + 128 * MEBIBYTE:
                await asyncio.sleep(PAUSE_S)
        await given_back()
