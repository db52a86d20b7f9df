"""What a client records of operations that fail, of batches, and of what goes on in the background.

OpenTelemetry's messaging conventions have each operation as a span and in a duration, and count all
messages that a program has tried to send; `error.type` tells those that failed apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import slatemq
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound
from tests.integration.client.peers import Instance
from tests.integration.client.test_tracing import attributes, measures, named, spans
from tests.integration.waiting import eventually

__all__ = ["measures", "spans"]

DURATION = "messaging.client.operation.duration"
Work = Callable[[slatemq.Client], Awaitable[None]]


@pytest.fixture
async def client(
    instance: Instance, spans: InMemorySpanExporter, measures: InMemoryMetricReader
) -> AsyncIterator[slatemq.Client]:
    async with slatemq.connect(instance.endpoint, tracing=True) as connected:
        yield connected


def recorded(measures: InMemoryMetricReader, metric: str) -> dict[tuple[str, str], int]:
    """What a metric counts, by the name of the operation and `error.type`."""
    data: Any = measures.get_metrics_data()
    return {
        (
            point.attributes["messaging.operation.name"],
            point.attributes.get("error.type", ""),
        ): point.count if hasattr(point, "count") else point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for one in scope.metrics
        if one.name == metric
        for point in one.data.data_points
    }


def is_error(span: ReadableSpan) -> bool:
    return span.status.status_code is trace.StatusCode.ERROR


async def consume(client: slatemq.Client) -> None:
    async with client.consume("q") as messages:
        await anext(messages)


async def consume_batches(client: slatemq.Client) -> None:
    async with client.consume_batches("q") as batches:
        await anext(batches)


async def claim(client: slatemq.Client) -> None:
    await client.claim("q")


@pytest.mark.parametrize("receive", [claim, consume, consume_batches])
async def test_a_receive_that_fails_is_recorded(
    instance: Instance,
    client: slatemq.Client,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    receive: Work,
) -> None:
    instance.broker.exists = False
    instance.broker.claims_max = 0  # and is nowhere else

    with pytest.raises(NotFound) as caught:
        await receive(client)

    span = named(spans, "receive q")
    assert is_error(span)
    assert attributes(span)["error.type"] == caught.value.reason
    assert recorded(measures, DURATION) == {("receive", caught.value.reason): 1}


@pytest.mark.parametrize("together", [False, True])
async def test_messages_that_could_not_be_sent_are_counted_as_such(
    instance: Instance,
    client: slatemq.Client,
    measures: InMemoryMetricReader,
    together: bool,
) -> None:
    await client.publish_many([b"1", b"2"])
    with pytest.raises(InvalidArgument) as caught:
        await (client.publish_many([b"bad", b"3"]) if together else client.publish(b"bad"))

    assert recorded(measures, "messaging.client.sent.messages") == {
        ("publish", ""): 2,
        ("publish", caught.value.reason): 2 if together else 1,
    }


async def leave(client: slatemq.Client) -> None:
    async with client.consume("q") as messages:
        for _ in range(2):
            async with await anext(messages):
                pass


async def fail_inside(client: slatemq.Client) -> None:
    async with client.consume("q") as messages:
        for _ in range(2):
            with suppress(ValueError):
                async with await anext(messages):
                    raise ValueError


async def leave_claimed(client: slatemq.Client) -> None:
    for message in await client.claim("q", 2):
        async with message:
            pass


async def release_soon(client: slatemq.Client) -> None:
    async with client.consume("q") as messages:
        for _ in range(2):
            (await anext(messages)).release_soon()


@pytest.mark.parametrize(
    ("work", "name"),
    [
        (leave, "ack"),
        (fail_inside, "nack"),
        (leave_claimed, "ack"),
        (release_soon, "release"),
    ],
)
async def test_each_settlement_of_a_message_is_recorded(
    instance: Instance,
    client: slatemq.Client,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    work: Work,
    name: str,
) -> None:
    instance.broker.available.extend([(b"1", 0), (b"2", 0)])

    await work(client)

    await eventually(lambda: recorded(measures, DURATION).get((name, "")) == 2)
    found = [span for span in spans.get_finished_spans() if span.name == f"{name} q"]
    assert len({attributes(span)["messaging.message.id"] for span in found}) == 2
    assert {attributes(span)["messaging.operation.type"] for span in found} == {"settle"}


async def leave_batch(client: slatemq.Client) -> None:
    async with client.consume_batches("q", 2) as batches, await anext(batches):
        pass


async def fail_inside_batch(client: slatemq.Client) -> None:
    with suppress(ValueError):
        async with client.consume_batches("q", 2) as batches, await anext(batches):
            raise ValueError


async def release_batch(client: slatemq.Client) -> None:
    async with client.consume_batches("q", 2) as batches:
        await (await anext(batches)).release_all()


async def interrupt_batch(client: slatemq.Client) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with client.consume_batches("q", 2) as batches, await anext(batches):
            inside.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await inside.wait()
    working.cancel()
    await asyncio.wait([working])


async def ack_tokens(client: slatemq.Client) -> None:
    await client.ack([one.lease_token for one in await client.claim("q", 2)])


async def nack_tokens(client: slatemq.Client) -> None:
    await client.nack([one.lease_token for one in await client.claim("q", 2)])


async def release_tokens(client: slatemq.Client) -> None:
    await client.nack([one.lease_token for one in await client.claim("q", 2)], release=True)


@pytest.mark.parametrize(
    ("work", "name", "title"),
    [
        (leave_batch, "ack", "ack q"),
        (fail_inside_batch, "nack", "nack q"),
        (release_batch, "release", "release q"),
        (interrupt_batch, "release", "release q"),
        (ack_tokens, "ack", "ack"),
        (nack_tokens, "nack", "nack"),
        (release_tokens, "release", "release"),
    ],
)
async def test_a_settlement_of_several_messages_is_recorded_with_their_number(
    instance: Instance,
    client: slatemq.Client,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    work: Work,
    name: str,
    title: str,
) -> None:
    instance.broker.available.extend([(b"1", 0), (b"2", 0)])

    await work(client)

    await eventually(lambda: (name, "") in recorded(measures, DURATION))
    assert recorded(measures, DURATION)[name, ""] == 1
    span = named(spans, title)
    assert attributes(span)["messaging.batch.message_count"] == 2
    assert span.kind is trace.SpanKind.CLIENT
    assert not is_error(span)


async def ack_one(client: slatemq.Client) -> None:
    (message,) = await client.claim("q")
    with pytest.raises(FailedPrecondition):
        await message.ack()


async def leave_one(client: slatemq.Client) -> None:
    async with client.consume("q") as messages, await anext(messages):
        pass


async def ack_token(client: slatemq.Client) -> None:
    (message,) = await client.claim("q")
    assert await client.ack([message.lease_token]) != [None]


@pytest.mark.parametrize("work", [ack_one, leave_one, leave_batch, ack_token])
async def test_a_settlement_that_is_refused_is_an_error(
    instance: Instance,
    client: slatemq.Client,
    spans: InMemorySpanExporter,
    measures: InMemoryMetricReader,
    work: Work,
) -> None:
    instance.broker.available.append((b"1", 0))
    instance.broker.ended.add("0-0000000000000000")

    await work(client)

    await eventually(lambda: ("ack", "LEASE_ENDED") in recorded(measures, DURATION))
    (span,) = [one for one in spans.get_finished_spans() if one.name.startswith("ack")]
    assert is_error(span)
    assert attributes(span)["error.type"] == "LEASE_ENDED"
