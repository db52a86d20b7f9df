"""The memory of a real broker under all that may come at once, against what README.md states."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.broker.config import BrokerConfig
from slatemq.v1 import (
    consumer_pb2,
    consumer_pb2_grpc,
    entry_pb2,
    entry_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
)
from tests.claimed_runs import messages_of
from tests.integration.serving.test_large_requests import Ingest as Measured
from tests.integration.stack.processes import WAIT_SECONDS, Service, Stack, patiently, running
from tests.slow_streams import slow_streams

MEBIBYTE = 1 << 20

CONSUME = "/slatemq.v1.ConsumerService/Consume"

QUEUES = [f"q{number}" for number in range(16)]
LARGE = 48
"""Messages of a mebibyte in each queue: the queues together have 768 MiB for their consumers."""

SMALL = 3 * 10_000
"""Messages that are assigned to each queue meanwhile."""

REQUESTS = 20
"""Requests of 60 MiB each at once: more than may be there."""

LISTINGS_EACH = 4
"""Pages of each queue that are asked for at once, each with payloads of up to 32 MiB."""

WATCHES_EACH = 4
"""Watches of the delayed messages of each queue, with payloads: as large as the others."""

DEAD = [f"dead{number}" for number in range(4)]
"""Queues whose dead letters, LARGE each, are redriven meanwhile by a filter that matches none."""

UNREAD = (
    # A connection of its own, since what is not read fills the window of its connection; and a
    # small window, as gRPC would take megabytes that no one reads.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 65_535),
)

DEFAULTS = BrokerConfig(root="memory:///")

BOUND_BYTES = (
    1024 * MEBIBYTE  # Requests
    + DEFAULTS.lane_bytes_max
    + DEFAULTS.delivery_bytes_max
    + DEFAULTS.uncommitted_bytes_max
    + DEFAULTS.payload_cache_bytes
)


@pytest.mark.slow
async def test_the_memory_of_a_broker_stays_below_what_is_stated_under_the_worst_mix(
    tmp_path: Path,
) -> None:
    """Slow: it moves gigabytes, so that what is not bounded shows."""
    async with running(tmp_path) as stack:
        measured = Measured(stack.broker.process, stack.broker.address, tmp_path / "log")
        for queue_id in QUEUES:
            await stack.create_queue(queue_id, "true")
        at_rest = measured.resident
        for queue_id in DEAD:
            await stack.create_queue(queue_id, "true")
        await publish(stack, [bytes(MEBIBYTE)] * LARGE)
        await stack.routed()
        for queue_id in DEAD:
            await fail(stack, queue_id, LARGE)
        await publish(stack, [bytes(MEBIBYTE)] * LARGE, delay_ms=3_600_000)
        await stack.routed()

        # When consumers claim all that there is and read nothing of it, and pages and watches of
        # delayed messages are not read either, while redrives read contents, and assignments, more
        # large requests than there is memory for, and slow streams with large messages come
        async with (
            grpc.aio.insecure_channel(stack.broker.address, options=UNREAD) as opened,
            unread(opened, measured, at_rest),
            slow_streams(stack.broker.address, CONSUME),
        ):
            await redrives(stack)
            await asyncio.gather(assignments(stack), requests(stack.broker))

            # Then the broker has no more than README.md states, and works
            assert measured.peak - at_rest < BOUND_BYTES
            await stack.create_queue("another", "true")


async def publish(stack: Stack, payloads: list[bytes], delay_ms: int = 0) -> None:
    stub = ingest_pb2_grpc.IngestServiceStub(stack.ingest.there)
    visible_at_ms = int(time.time() * 1000) + delay_ms if delay_ms else None
    messages = [
        ingest_pb2.PublishRun(payloads=[payload], visible_at_ms=visible_at_ms)
        for payload in payloads
    ]
    await patiently(lambda: stub.Publish(ingest_pb2.PublishRequest(runs=messages)))


async def fail(stack: Stack, queue_id: str, count: int) -> None:
    """Makes dead letters of this many messages."""
    stub = consumer_pb2_grpc.ConsumerServiceStub(stack.broker.there)
    while count:
        wanted = consumer_pb2.ClaimRequest(queue_id=queue_id, max_messages=8, wait_ms=10_000)
        claimed = messages_of(await stub.Claim(wanted))
        failed = [
            consumer_pb2.Command(fail=consumer_pb2.FailCommand(lease_token=one.lease_token))
            for one in claimed
        ]
        await stub.Execute(consumer_pb2.ExecuteRequest(commands=failed))
        count -= len(claimed)


async def redrives(stack: Stack) -> None:
    stub = entry_pb2_grpc.DeadLetterServiceStub(stack.broker.there)
    for queue_id in DEAD:
        await stub.StartRedrive(entry_pb2.StartRedriveRequest(queue_id=queue_id, filter="size < 0"))


async def assignments(stack: Stack) -> None:
    for _ in range(SMALL // 10_000):
        await publish(stack, [b"x"] * 10_000)
    await stack.routed()


async def requests(broker: Service) -> None:
    """Lists of commands, as large as one may be, none of which may be done."""
    push = consumer_pb2.PushCommand(queue_id="none", payload=bytes(60 * MEBIBYTE))
    commands = [
        consumer_pb2.Command(push=push),
        consumer_pb2.Command(complete=consumer_pb2.CompleteCommand(lease_token="none")),
    ]
    data = consumer_pb2.ExecuteRequest(commands=commands).SerializeToString()
    execute: Any = broker.there.unary_unary("/slatemq.v1.ConsumerService/Execute")
    # Not their time is judged: a gigabyte and a half may take minutes on a busy machine.
    await asyncio.gather(*(refused(execute(data, timeout=600)) for _ in range(REQUESTS)))


async def refused(call: Awaitable[Any]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is not grpc.StatusCode.DEADLINE_EXCEEDED


@asynccontextmanager
async def unread(opened: grpc.aio.Channel, measured: Measured, at_rest: int) -> AsyncIterator[None]:
    """Streams, claims, pages and watches whose answers are not read."""
    # To the client each answer is a stream: it takes no more of one than is read.
    consume: Any = opened.stream_stream(CONSUME)
    claim: Any = opened.unary_stream("/slatemq.v1.ConsumerService/Claim")
    list_: Any = opened.unary_stream("/slatemq.v1.EntryService/ListEntries")
    watch: Any = opened.unary_stream("/slatemq.v1.DelayedService/WatchDelayed")
    calls = []
    for queue_id in QUEUES:
        page = entry_pb2.ListEntriesRequest(
            queue_id=queue_id,
            state=queue_pb2.ENTRY_STATE_AVAILABLE,
            page_size=1_000,
            view=entry_pb2.ENTRY_VIEW_FULL,
        )
        calls += [list_(page.SerializeToString()) for _ in range(LISTINGS_EACH)]
        watched = entry_pb2.WatchDelayedRequest(queue_id=queue_id, view=entry_pb2.ENTRY_VIEW_FULL)
        calls += [watch(watched.SerializeToString()) for _ in range(WATCHES_EACH)]
    async with asyncio.timeout(WAIT_SECONDS):
        while measured.peak - at_rest < DEFAULTS.delivery_bytes_max:
            await asyncio.sleep(0.05)
    for queue_id in QUEUES:
        start = consumer_pb2.ConsumeStart(queue_id=queue_id)
        start.credit.messages_count = 100_000
        stream = consume()
        await stream.write(consumer_pb2.ConsumeRequest(start=start).SerializeToString())
        wanted = consumer_pb2.ClaimRequest(queue_id=queue_id, max_messages=10_000, wait_ms=30_000)
        calls += [stream, claim(wanted.SerializeToString())]
    try:
        yield
    finally:
        for call in calls:
            call.cancel()
