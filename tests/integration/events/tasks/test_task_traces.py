"""The trace of a publish that is a task: one from the call to the headers of its message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.events.settings import QueueSettings
from libs.serving.recording import recording
from libs.serving.telemetry import Telemetry
from libs.storage.errors import StoreUnavailable
from services.ingest.write.uploads import Uploads
from services.ingest.write.waiting import Waiting
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.v1 import ingest_pb2
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.tasks.queued_ingest import QueuedIngest, queue_settings, queued
from tests.integration.ingest.server import message
from tests.integration.stack.test_traces import OTHER, TRACE, context_of, named

pytestmark = pytest.mark.slow  # A real server.

BLOB = bytes(65_536)


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[QueueSettings]:
    with running(RedisServer(tmp_path, "streams")) as server:
        yield queue_settings("redis", server)


class Traced:
    """Telemetry, and the spans that it recorded."""

    def __init__(self) -> None:
        self.spans = InMemorySpanExporter()
        processor = SimpleSpanProcessor(self.spans)
        self.telemetry: Telemetry = recording(
            "ingest", "ingest-0", processor, InMemoryMetricReader()
        )

    def only(self, name: str, trace: str) -> ReadableSpan:
        (span,) = named(self.spans, name, trace)
        return span


async def publish(ingest: QueuedIngest, trace: str, payload: bytes) -> ingest_pb2.PublishResponse:
    """Publish under one request ID, as a caller who has this trace."""
    request = ingest_pb2.PublishRequest(runs=[message(payload)], request_id="r")
    with raising_slatemq_errors():
        answer: ingest_pb2.PublishResponse = await ingest.stub.Publish(
            request, timeout=60, metadata=context_of(trace)
        )
        return answer


async def test_a_task_is_applied_and_its_message_carried_on_in_the_trace_of_its_call(
    settings: QueueSettings,
) -> None:
    traced = Traced()
    async with queued(settings, telemetry=traced.telemetry) as ingest:
        # When a caller publishes within a trace
        answer = await publish(ingest, TRACE, b"x")
        (message_id,) = await ingest.applied(answer.task_id)

        # Then what applied it is a part of that trace, below the call, and the message goes on
        (stored,) = (await ingest.read(message_id)).messages
        applied = traced.only("apply", TRACE)
        published = traced.only("publish", TRACE)
        assert applied.parent is not None
        assert published.context is not None
        assert applied.parent.span_id == published.context.span_id
        assert applied.context is not None
        context = f"00-{TRACE}-{applied.context.span_id:016x}-01"
        assert stored.headers["traceparent"] == context
        assert applied.attributes is not None
        assert applied.attributes["slatemq.task_id"] == answer.task_id

        # And a repeat within another trace is the same request
        again = await publish(ingest, OTHER, b"x")
        assert list(again.message_ids) == [message_id]
    traced.telemetry.shutdown()


async def test_a_task_that_is_tried_again_keeps_the_fingerprint_of_its_request(
    settings: QueueSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced, tries = Traced(), 0
    upload = Uploads.all_of

    async def fail_first(uploads: Uploads, waiting: Waiting) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise StoreUnavailable("down for a moment")
        await upload(uploads, waiting)

    # Given a store that is down for the first try, once the trace is in the headers
    monkeypatch.setattr(Uploads, "all_of", fail_first)
    async with queued(settings, telemetry=traced.telemetry) as ingest:
        (message_id,) = await ingest.applied((await publish(ingest, TRACE, BLOB)).task_id)
        assert tries == 2
        (stored,) = (await ingest.read(message_id)).messages
        assert TRACE in stored.headers["traceparent"]

        # Then the same request has the same answer
        assert list((await publish(ingest, OTHER, BLOB)).message_ids) == [message_id]
    traced.telemetry.shutdown()
