"""In whose trace a broker reads what claims wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving.recording import recording
from libs.serving.telemetry import Telemetry
from services.broker.delivery.message_cache import IngestMessages
from slatemq.v1 import consumer_pb2
from tests.claimed_runs import ClaimedMessage, messages_of
from tests.integration.broker.rig import Ingest, Rig, running
from tests.integration.waiting import eventually

FIRST, SECOND = "1" * 32, "2" * 32
NONE = "0" * 32


class Noting(Ingest):
    """Notes in whose trace it is asked.

    Attributes:
        fetches: For which messages, and in whose trace.
        checks: In whose trace each check is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fetches: list[tuple[list[int], str]] = []
        self.checks: list[str] = []

    async def fetch(self, shard: int, ids: Sequence[int], max_bytes: int) -> IngestMessages:
        self.fetches.append((list(ids), _current()))
        return await super().fetch(shard, ids, max_bytes)

    async def check(self, shard: int) -> None:
        self.checks.append(_current())
        await super().check(shard)


def _current() -> str:
    return f"{trace.get_current_span().get_span_context().trace_id:032x}"


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = recording(
        "broker", "broker-0", SimpleSpanProcessor(InMemorySpanExporter()), InMemoryMetricReader()
    )
    yield made
    made.shutdown()


async def claim(rig: Rig, trace_id: str) -> list[ClaimedMessage]:
    request = consumer_pb2.ClaimRequest(queue_id="q", max_messages=1, wait_ms=30_000)
    metadata = (("traceparent", f"00-{trace_id}-{'3' * 16}-01"),)
    return messages_of(await rig.consumers.Claim(request, metadata=metadata))


async def test_what_a_claim_waits_for_is_read_in_its_trace_whichever_claim_came_first(
    telemetry: Telemetry,
) -> None:
    # Given a claim whose message is being read, and another one that comes meanwhile
    ingest = Noting()
    async with running(ingest=ingest, telemetry=telemetry) as rig, asyncio.timeout(60):
        await rig.create()
        await rig.assign([1, 2])
        ingest.read_gate.clear()
        first = asyncio.create_task(claim(rig, FIRST))
        await eventually(lambda: ingest.fetches)
        second = asyncio.create_task(claim(rig, SECOND))
        await eventually(lambda: rig.delivery.places.count == 2)

        # When the first one goes on, and so the second
        ingest.read_gate.set()
        claimed = [*await first, *await second]

    # Then each read is in the trace of the claim that waited for it
    assert [one.message.message_id for one in claimed] == [1, 2]
    assert ingest.fetches == [([1], FIRST), ([2], SECOND)]


async def test_an_ingest_that_is_down_is_asked_again_in_no_claims_trace(
    telemetry: Telemetry,
) -> None:
    ingest = Noting()
    async with running(ingest=ingest, telemetry=telemetry) as rig, asyncio.timeout(60):
        await rig.create()
        await rig.assign([1])
        ingest.down = True
        waiting = asyncio.create_task(claim(rig, FIRST))
        await eventually(lambda: ingest.checks)
        ingest.down = False
        await waiting

    assert ingest.fetches[0] == ([1], FIRST)
    assert set(ingest.checks) == {NONE}
