"""One trace from a publish to its claim, over every call between the processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving.channels import open_channel
from libs.serving.config import load
from libs.serving.server import RunningService, _Signals
from libs.serving.telemetry import Telemetry, recording
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

TRACE = "5" * 32
OTHER = "6" * 32
WAIT_S = 60

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
    """A service in this process; a channel to it."""
    config_type, build = SERVICES[kind]
    config: Any = load(config_type, kind, ["--root", (root / "data").as_uri()], {})
    service = RunningService(build(config, telemetry), config, telemetry)
    signals = _Signals()
    run = asyncio.create_task(service.run(signals))
    try:
        async with asyncio.timeout(WAIT_S):
            while service.gate._closed is not None:
                assert not run.done(), run.result()
                await asyncio.sleep(0.01)
        async with open_channel(service.address) as channel:
            yield channel
    finally:
        signals.first.set()
        await run


def context_of(trace: str) -> tuple[tuple[str, str], ...]:
    """Metadata of a call by somebody who has this trace."""
    return (("traceparent", f"00-{trace}-{'2' * 16}-01"),)


def named(spans: InMemorySpanExporter, name: str, trace: str) -> list[ReadableSpan]:
    return [
        span
        for span in spans.get_finished_spans()
        if span.name == name
        and span.context is not None
        and f"{span.context.trace_id:032x}" == trace
    ]


async def test_a_trace_goes_on_from_the_publish_to_the_router_the_broker_and_the_claim(
    tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    # Given the three services, each with telemetry of its own
    async with AsyncExitStack() as there:
        channels = {
            kind: await there.enter_async_context(
                running(
                    kind,
                    tmp_path,
                    recording(
                        kind, f"{kind}-0", SimpleSpanProcessor(spans), InMemoryMetricReader()
                    ),
                )
            )
            for kind in SERVICES
        }
        queues: Any = queue_pb2_grpc.QueueServiceStub(channels["broker"])
        ingest: Any = ingest_pb2_grpc.IngestServiceStub(channels["ingest"])
        consumers: Any = consumer_pb2_grpc.ConsumerServiceStub(channels["broker"])
        await queues.CreateQueue(
            queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id="q")), timeout=30
        )

        # When a producer with a trace publishes, and a consumer with another one claims
        message = ingest_pb2.PublishMessage(payload=b"x", headers={"queue": "q"})
        await ingest.Publish(
            ingest_pb2.PublishRequest(messages=[message]), metadata=context_of(TRACE), timeout=30
        )
        claimed = await consumers.Claim(
            consumer_pb2.ClaimRequest(queue_id="q", max_messages=1, wait_ms=30_000),
            metadata=context_of(OTHER),
            timeout=40,
        )

        # Then the message carries the producer's trace, and so does every call on its way
        assert TRACE in claimed.messages[0].message.headers["traceparent"]
        async with asyncio.timeout(WAIT_S):
            while not named(spans, "slatemq.v1.AssignmentService/Assign", TRACE):
                await asyncio.sleep(0.01)
        (published,) = named(spans, "publish", TRACE)
        (routed,) = named(spans, "route", TRACE)
        (assigned,) = named(spans, "slatemq.v1.AssignmentService/Assign", TRACE)
        assert routed.parent is not None
        assert published.context is not None
        assert routed.parent.span_id == published.context.span_id
        assert assigned.parent is not None
        assert routed.context is not None
        assert assigned.parent.span_id == routed.context.span_id
        # And the claim is in the consumer's; payloads may have been fetched ahead of it
        async with asyncio.timeout(WAIT_S):
            while not named(spans, "slatemq.v1.ConsumerService/Claim", OTHER):
                await asyncio.sleep(0.01)


def test_calls_carry_nothing_where_nothing_is_recorded() -> None:
    assert Telemetry().carrier is None
