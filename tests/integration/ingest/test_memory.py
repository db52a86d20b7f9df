"""The memory of a real ingest under all that may come at once, against what README.md states."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.serving.peers.channels import open_channel
from services.ingest.config import IngestConfig
from slatemq._rpc.stored_runs import messages_of
from slatemq.v1 import ingest_pb2, ingest_pb2_grpc, snapshot_pb2, snapshot_pb2_grpc
from tests.integration.ingest.test_unread import MEBIBYTE, MESSAGES, UNREAD, publish
from tests.integration.serving.test_large_requests import (
    PUBLISH,
    PUBLISH_STREAM,
    Ingest,
    channel,
    ended,
    ingest,
    method,
    on_stream,
)
from tests.slow_streams import slow_streams

UNREAD_READS = 24
UNREAD_TAILS = 48

PUBLISHES = 20
"""Of 60 MiB each."""

STREAMS = 150
"""With a message of 1.9 MiB each: larger ones are refused on streams."""

EDITS = 100
"""Each puts another mebibyte into a message."""

SNAPSHOTS = 10

BROKER_READS = 80
"""Of ten mebibytes each, eight at a time, and read."""

WAIT_SECONDS = 300
"""A gigabyte and a half may take minutes on a busy machine."""

DEFAULTS = IngestConfig(root="memory:///")

BOUND_BYTES = (
    1024 * MEBIBYTE  # Requests
    + 2 * DEFAULTS.answers_bytes_max
    + DEFAULTS.uncommitted_bytes_max
    + DEFAULTS.payload_cache_bytes
    + 50 * MEBIBYTE  # Log entries
)


@pytest.mark.slow
async def test_the_memory_of_an_ingest_stays_below_what_is_stated_under_the_worst_mix(
    tmp_path: Path,
) -> None:
    """Slow: it moves gigabytes, so that what is not bounded shows."""
    async with ingest(tmp_path) as there, open_channel(there.address) as opened:
        stub = ingest_pb2_grpc.IngestServiceStub(opened)
        large = await publish(stub, [bytes(MEBIBYTE)] * MESSAGES)
        small = await publish(stub, [b"x"] * 10_000)
        at_rest = there.resident

        # When large publishes come, by calls and on streams, while messages are edited, snapshots
        # taken and messages read by brokers, and others do not read what they asked for, or send
        # large messages slowly
        async with unread(there, large), slow_streams(there.address, PUBLISH_STREAM):
            codes, *_ = await asyncio.gather(
                publishes(there), edits(opened, large), snapshots(opened), reads(opened, large)
            )

            # Then some publishes are stored, and the ingest has no more than README.md states
            assert codes[None] > 0, codes
            assert there.peak - at_rest < BOUND_BYTES
            answer = await stub.BatchGetMessages(
                ingest_pb2.BatchGetMessagesRequest(message_ids=small[:10])
            )
            assert [one.payload for one in messages_of(answer.runs)] == [b"x"] * 10
        assert " ERROR " not in there.log.read_text()


async def publishes(there: Ingest) -> Counter[grpc.StatusCode | None]:
    """How large publishes end that come at once, by calls and on streams."""
    message = ingest_pb2.PublishRun(payloads=[bytes(60 * MEBIBYTE)])
    whole = ingest_pb2.PublishRequest(runs=[message]).SerializeToString()
    message = ingest_pb2.PublishRun(payloads=[bytes(1_900 << 10)])
    on_streams = ingest_pb2.PublishStreamRequest(
        publish=ingest_pb2.PublishRequest(runs=[message])
    ).SerializeToString()
    channels = [channel(there.address) for _ in range(4)]
    errors, codes = await asyncio.gather(
        asyncio.gather(
            *(
                ended(method(channels[number % 4], PUBLISH)(whole, timeout=WAIT_SECONDS))
                for number in range(PUBLISHES)
            )
        ),
        asyncio.gather(*(on_stream(channels[number % 4], on_streams) for number in range(STREAMS))),
    )
    for one in channels:
        await one.close()
    return Counter([*(error.code() if error else None for error in errors), *codes])


async def edits(opened: grpc.aio.Channel, message_ids: list[int]) -> None:
    replace: Any = opened.unary_unary("/slatemq.v1.IngestService/ReplaceMessage")
    requests = [
        ingest_pb2.ReplaceMessageRequest(
            message_id=message_ids[number % len(message_ids)],
            payload=bytes([number]) * MEBIBYTE,
            keep_headers=True,
        ).SerializeToString()
        for number in range(EDITS)
    ]
    await asyncio.gather(*(ended(replace(one, timeout=WAIT_SECONDS)) for one in requests))


async def snapshots(opened: grpc.aio.Channel) -> None:
    stub = snapshot_pb2_grpc.SnapshotServiceStub(opened)
    for _ in range(SNAPSHOTS):
        await ended(stub.CreateSnapshot(snapshot_pb2.CreateSnapshotRequest()))


async def reads(opened: grpc.aio.Channel, message_ids: list[int]) -> None:
    """Reads as brokers make them, some at a time."""
    read: Any = opened.unary_unary("/slatemq.v1.IngestService/BatchGetMessages")
    request = ingest_pb2.BatchGetMessagesRequest(message_ids=message_ids, max_bytes=10 * MEBIBYTE)
    for _ in range(BROKER_READS // 8):
        await asyncio.gather(
            *(ended(read(request.SerializeToString(), timeout=WAIT_SECONDS)) for _ in range(8))
        )


@asynccontextmanager
async def unread(there: Ingest, message_ids: list[int]) -> AsyncIterator[None]:
    """Reads and tails of all there is, whose answers are not read."""
    async with grpc.aio.insecure_channel(there.address, options=UNREAD) as opened:
        # To the client each answer is a stream: it takes no more of one than is read.
        read: Any = opened.unary_stream("/slatemq.v1.IngestService/BatchGetMessages")
        request = ingest_pb2.BatchGetMessagesRequest(message_ids=message_ids)
        calls = [read(request.SerializeToString()) for _ in range(UNREAD_READS)]
        tail = ingest_pb2_grpc.IngestServiceStub(opened).TailLog
        calls += [tail(ingest_pb2.TailLogRequest()) for _ in range(UNREAD_TAILS)]
        yield
        for call in calls:
            call.cancel()
