"""One trace from a publish to its claim, over every call between the processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving.peers.channels import open_channel
from libs.serving.process.config import load
from libs.serving.recording import recording
from libs.serving.server import RunningService, Signals
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.broker.config import BrokerConfig
from services.broker.service import BrokerService
from services.ingest.config import IngestConfig
from services.ingest.service import IngestProcess
from services.router.config import RouterConfig
from services.router.service import RouterProcess
from slatemq.v1 import (
    consumer_pb2,
    consumer_pb2_grpc,
    ingest_pb2,
    ingest_pb2_grpc,
    queue_pb2,
    queue_pb2_grpc,
)
from tests.claimed_runs import ClaimedMessage, messages_of

TRACE = "5" * 32
OTHER = "6" * 32
WAIT_S = 60
ASSIGN = "slatemq.v1.AssignmentService/Assign"
FETCH = "slatemq.v1.IngestService/BatchGetMessages"
QUEUE = queue_pb2.GetQueueRequest(queue_id="q")


class Stubs(NamedTuple):
    """What the three services are called by."""

    queues: Any
    ingest: Any
    consumers: Any
    broker: Any


SERVICES: dict[str, tuple[Any, Any]] = {
    "ingest": (IngestConfig, IngestProcess),
    "broker": (BrokerConfig, BrokerService),
    "router": (RouterConfig, RouterProcess),
}


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@asynccontextmanager
async def running(kind: str, root: Path, telemetry: Telemetry) -> AsyncIterator[Any]:
    """A service in this process, and a channel to it."""
    config_type, build = SERVICES[kind]
    config: Any = load(config_type, kind, ["--root", (root / "data").as_uri()], {})
    built = build(config, telemetry, open_root(config.root))
    service = RunningService(built, config, telemetry)
    signals = Signals()
    run = asyncio.create_task(service.run(signals))
    try:
        async with asyncio.timeout(WAIT_S):
            while service.gate._closed is not None:
                assert not run.done(), run.result()
                await asyncio.sleep(0.01)
        async with open_channel(service.address) as channel:
            yield built, channel
    finally:
        signals.first.set()
        await run


def context_of(trace: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call by someone who has this trace."""
    return (("traceparent", f"00-{trace}-{'2' * 16}-01"),)


def named(spans: InMemorySpanExporter, name: str, trace: str) -> list[ReadableSpan]:
    return [
        span
        for span in spans.get_finished_spans()
        if span.name == name
        and span.context is not None
        and f"{span.context.trace_id:032x}" == trace
    ]


@asynccontextmanager
async def all_running(root: Path, spans: InMemorySpanExporter) -> AsyncIterator[Stubs]:
    """Ingest, broker and router, each with telemetry of its own, and a queue `q`."""
    async with AsyncExitStack() as there:
        built, channels = {}, {}
        for kind in SERVICES:
            processor, reader = SimpleSpanProcessor(spans), InMemoryMetricReader()
            telemetry = recording(kind, f"{kind}-0", processor, reader)
            built[kind], channels[kind] = await there.enter_async_context(
                running(kind, root, telemetry)
            )
        stubs = Stubs(
            queue_pb2_grpc.QueueServiceStub(channels["broker"]),
            ingest_pb2_grpc.IngestServiceStub(channels["ingest"]),
            consumer_pb2_grpc.ConsumerServiceStub(channels["broker"]),
            built["broker"],
        )
        created = queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id="q"))
        made = (await stubs.queues.CreateQueue(created, timeout=30)).queue
        # An assignment by rules from before it is refused, and is in a trace twice.
        link = built["router"].router.links[0]
        async with asyncio.timeout(WAIT_S):
            while link.rules.revision < made.revision:
                await asyncio.sleep(0.01)
        yield stubs


async def publish(stubs: Stubs, payload: bytes = b"x") -> None:
    message = ingest_pb2.PublishRun(payloads=[payload], headers={"queue": "q"})
    request = ingest_pb2.PublishRequest(runs=[message])
    await stubs.ingest.Publish(request, metadata=context_of(TRACE), timeout=30)


async def claim(stubs: Stubs) -> ClaimedMessage:
    request = consumer_pb2.ClaimRequest(queue_id="q", max_messages=1, wait_ms=30_000)
    answer: consumer_pb2.ClaimResponse = await stubs.consumers.Claim(
        request, metadata=context_of(OTHER), timeout=40
    )
    return messages_of(answer)[0]


async def ended(spans: InMemorySpanExporter, name: str, trace: str) -> ReadableSpan:
    """The one span of this name, once it has ended."""
    async with asyncio.timeout(WAIT_S):
        while not named(spans, name, trace):
            await asyncio.sleep(0.01)
    (span,) = named(spans, name, trace)
    return span


async def test_a_trace_goes_on_from_the_publish_to_the_router_the_broker_and_the_claim(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with all_running(tmp_path, spans) as stubs:
        # When a producer with a trace publishes, and a consumer with another one claims
        await publish(stubs)
        async with asyncio.timeout(WAIT_S):
            while not (await stubs.queues.GetQueue(QUEUE, timeout=30)).queue.counts.available_count:
                await asyncio.sleep(0.01)
        claimed = await claim(stubs)

        # Then the message carries the producer's trace, and so does every call on its way
        assert TRACE in claimed.message.headers["traceparent"]
        published = await ended(spans, "publish", TRACE)
        routed = await ended(spans, "route", TRACE)
        assigned = await ended(spans, ASSIGN, TRACE)
        assert routed.parent is not None
        assert published.context is not None
        assert routed.parent.span_id == published.context.span_id
        assert assigned.parent is not None
        assert routed.context is not None
        assert assigned.parent.span_id == routed.context.span_id
        # And the claim, with the read of the payload that it needs, is in the consumer's
        claiming = await ended(spans, "slatemq.v1.ConsumerService/Claim", OTHER)
        fetched = await ended(spans, FETCH, OTHER)
        assert claiming.context is not None
        assert fetched.parent is not None
        assert fetched.parent.span_id == claiming.context.span_id
        assert named(spans, FETCH, TRACE) == []


async def test_a_payload_that_is_read_for_those_who_wait_is_in_the_trace_of_the_publish(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    async with all_running(tmp_path, spans) as stubs:
        claiming = asyncio.create_task(claim(stubs))
        async with asyncio.timeout(WAIT_S):
            while not stubs.broker.broker.delivery.has_waiters("q"):
                await asyncio.sleep(0.01)

        # When one is published that is too large to come along with its assignment
        await publish(stubs, bytes(200_000))

        await claiming
        assigned, fetched = await ended(spans, ASSIGN, TRACE), await ended(spans, FETCH, TRACE)
        assert assigned.context is not None
        assert fetched.parent is not None
        assert fetched.parent.span_id == assigned.context.span_id
        assert named(spans, FETCH, OTHER) == []


def test_calls_carry_nothing_where_nothing_is_recorded() -> None:
    assert Telemetry().carrier is None
