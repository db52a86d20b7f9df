"""In which trace the calls of a client are: each of what it is for, none of who came first."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider

import slatemq
from slatemq import BatchSettings, Received
from tests.integration.client.peers import Instance
from tests.integration.client.test_tracing import Metadata
from tests.integration.waiting import eventually

Settle = Callable[[Received], Any]


@pytest.fixture(autouse=True)
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[trace.Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    yield provider.get_tracer("a program")
    provider.shutdown()


@pytest.fixture
def seen() -> Metadata:
    return Metadata()


@pytest.fixture
async def instance(seen: Metadata) -> AsyncIterator[Instance]:
    async with Instance(interceptors=[seen]) as made:
        yield made


def traces(seen: Metadata, method: str) -> list[str]:
    """In which traces a method was called; empty where in none."""
    return [context.split("-")[1] if context else "" for context in seen.contexts[method]]


async def within(tracer: trace.Tracer, settle: Settle, message: Received) -> str:
    """Settles a message in a trace of its own; gives its ID."""
    with tracer.start_as_current_span("work", context=Context()) as span:
        await settle(message)
        return f"{span.get_span_context().trace_id:032x}"


@pytest.mark.parametrize("kind", ["ack", "nack", "left"])
async def test_a_settlement_is_in_the_trace_of_its_message_whichever_came_first(
    instance: Instance, tracer: trace.Tracer, seen: Metadata, kind: str
) -> None:
    async def leave(message: Received) -> None:
        async with message:
            pass
        await client._finisher.flush_acks()

    settle: Settle = {"ack": Received.ack, "nack": Received.nack, "left": leave}[kind]
    # Given a settlement that has no answer yet, and one that comes meanwhile
    instance.broker.available.extend([(b"1", 0), (b"2", 0)])
    answers = instance.broker.answers_nacks if kind == "nack" else instance.broker.answers_acks
    answers.clear()
    method = "Nack" if kind == "nack" else "Ack"
    async with (
        slatemq.connect(instance.endpoint, tracing=True) as client,
        client.consume("q") as messages,
        asyncio.timeout(60),
    ):
        one, two = await anext(messages), await anext(messages)
        first = asyncio.create_task(within(tracer, settle, one))
        await eventually(lambda: method in seen.contexts)
        second = asyncio.create_task(within(tracer, settle, two))
        batchers = client._finisher._nacks if kind == "nack" else client._finisher._acks
        await eventually(lambda: batchers[0]._waiting)

        # When the first is answered, and the second one goes out
        answers.set()
        wanted = [await first, await second]

        # Then the call of each is in its own trace
        assert len({*wanted}) == 2
        assert traces(seen, method) == wanted


async def test_what_a_consumer_does_for_all_its_messages_is_in_no_trace(
    instance: Instance, tracer: trace.Tracer, seen: Metadata
) -> None:
    # Given a message whose lease is soon to be extended
    instance.broker.lease_ms = 1500
    instance.broker.available.append((b"1", 0))
    async with slatemq.connect(instance.endpoint, tracing=True) as client, asyncio.timeout(60):
        # When consumers begin within a span
        with tracer.start_as_current_span("work"):
            async with client.consume("q") as messages:
                await anext(messages)
                await eventually(lambda: instance.broker.extended)
            async with client.consume_batches("q") as batches:
                instance.broker.available.append((b"2", 0))
                await anext(batches)

    # Then what goes on after it is not in its trace
    for method in ("Consume", "ExtendLease", "Claim"):
        assert {*traces(seen, method)} == {""}, method


async def test_a_request_to_publish_is_in_the_trace_of_its_first_message(
    instance: Instance, tracer: trace.Tracer, seen: Metadata
) -> None:
    async def publish(payload: bytes) -> str:
        with tracer.start_as_current_span("work", context=Context()) as span:
            await client.publish(payload)
            return f"{span.get_span_context().trace_id:032x}"

    # Given a request too large for a stream, and one that must wait for its end
    settings = BatchSettings(requests_max=1)
    async with (
        slatemq.connect(instance.endpoint, tracing=True, batches=settings) as client,
        asyncio.timeout(60),
    ):
        instance.ingest.gate.clear()
        first = asyncio.create_task(publish(bytes(2 << 20)))
        await instance.ingest.asked.wait()
        second = asyncio.create_task(publish(bytes(2 << 20)))
        await eventually(lambda: client._publisher._singles._open)

        # When both are answered
        instance.ingest.gate.set()
        wanted = [await first, await second]

        # Then each is in its trace, and the stream, which all share, in none
        assert traces(seen, "Publish") == wanted
        await client.publish(b"small")
        assert traces(seen, "PublishStream") == [""]
