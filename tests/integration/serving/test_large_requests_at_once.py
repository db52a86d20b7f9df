"""More large requests at once than there is memory for, at a real ingest: gigabytes each time."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import grpc
import grpc.aio
import pytest

from slatemq.v1 import ingest_pb2
from tests.forms import proof
from tests.integration.serving.test_large_requests import (
    MEBIBYTE,
    channel,
    ended,
    ingest,
    method,
    on_stream,
)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mebibytes"), [proof(24, 60), (300, 4)])
async def test_large_publishes_side_by_side_are_bounded_in_memory_and_leave_none_behind(
    tmp_path: Path, count: int, mebibytes: int
) -> None:
    """The bound is that of README.md, over what the process has at rest."""
    async with ingest(tmp_path) as there:
        before = there.resident
        message = ingest_pb2.PublishRun(
            payloads=[bytes(mebibytes * MEBIBYTE)], headers={"queue": "q"}
        )
        request = ingest_pb2.PublishRequest(runs=[message]).SerializeToString()
        channels = [channel(there.address) for _ in range(4)]

        # When more than a gigabyte comes at once
        calls = [
            ended(method(channels[number % 4])(request, timeout=120)) for number in range(count)
        ]
        codes = Counter(error.code() if error else None for error in await asyncio.gather(*calls))

        # Then some are stored, and the others are asked to come back
        assert codes[None] >= 4, codes
        # CANCELLED: so gRPC's client may take a refusal that comes while it sends.
        assert set(codes) <= {
            None,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.CANCELLED,
        }, codes
        assert there.peak - before < 1024 * MEBIBYTE
        async with asyncio.timeout(60):
            while there.resident > before + 256 * MEBIBYTE:
                await asyncio.sleep(0.1)
        for one in channels:
            await one.close()


@pytest.mark.slow
@pytest.mark.parametrize(("count", "mebibytes"), [(24, 60), (300, 1.9)])
async def test_large_messages_on_streams_side_by_side_are_bounded_in_memory(
    tmp_path: Path, count: int, mebibytes: float
) -> None:
    """The bound is that of README.md, over what the process has at rest."""
    async with ingest(tmp_path) as there:
        before = there.resident
        message = ingest_pb2.PublishRun(payloads=[bytes(int(mebibytes * MEBIBYTE))])
        publish = ingest_pb2.PublishRequest(runs=[message])
        request = ingest_pb2.PublishStreamRequest(publish=publish).SerializeToString()
        channels = [channel(there.address) for _ in range(4)]

        # When more arrives at once than there is memory for
        streams = [on_stream(channels[number % 4], request) for number in range(count)]
        codes = Counter(await asyncio.gather(*streams))

        # Then what is too large for a stream is stored by none, and the rest by some
        assert (codes[None] > 0) == (mebibytes < 2), codes
        # INTERNAL: so gRPC's client may take the end of a stream that comes while it sends.
        assert set(codes) <= {
            None,
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            grpc.StatusCode.INTERNAL,
        }, codes
        assert there.peak - before < 1024 * MEBIBYTE
        assert " ERROR " not in there.log.read_text()
        # And publishes are answered
        small = ingest_pb2.PublishRequest(runs=[ingest_pb2.PublishRun(payloads=[b"x"])])
        assert await ended(method(channels[0])(small.SerializeToString(), timeout=60)) is None
        for one in channels:
            await one.close()
