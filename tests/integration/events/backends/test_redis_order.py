"""In which order events come from a Redis stream whose connections break."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from libs.events.backends import open_backend
from libs.events.deliveries import end_task
from libs.events.redis.connection import open_client
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.event_stream import EventStream
from slatemq.events.envelope import Event
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import created
from tests.integration.events.conftest import eventually

pytestmark = pytest.mark.slow  # A real server.


async def test_events_that_were_read_as_a_connection_broke_come_before_newer_ones(
    tmp_path: Path,
) -> None:
    with running(RedisServer(tmp_path, "streams")) as server:
        settings = msgspec.structs.replace(server.settings("order"), retry_delay_ms=60_000)
        client = open_client(settings)
        stream = EventStream(client, settings, "reader", DeadLetters(client, "order"))
        await stream.start(frozenset())
        got: list[Event] = []

        async def handle(event: Event) -> None:
            got.append(event)
            if event != kept:
                await stream.acknowledge(event.id)

        async def deliver(until: int) -> None:
            delivering = asyncio.create_task(stream.deliver(frozenset(), handle, lambda: None))
            await eventually(lambda: len(got) >= until)
            await end_task(delivering)

        # Given an event that its handler still has, and two whose response was lost
        events = [created(f"{number}") for number in range(5)]
        kept = events[0]
        await stream.publish([kept])
        await deliver(until=1)
        await stream.publish(events[1:3])
        await client.xreadgroup(settings.consumer_group, "reader", {"order:events": ">"})

        # When newer ones follow, and the reader connects again
        await stream.publish(events[3:])
        await deliver(until=5)

        # Then all come in order, and the one that is held not a second time
        assert got == events
        await client.aclose()


async def test_events_that_come_after_redis_lost_its_data_are_delivered(tmp_path: Path) -> None:
    with running(RedisServer(tmp_path, "streams")) as server:
        settings = server.settings("emptied")
        publisher, subscriber = open_backend("redis"), open_backend("redis")
        for backend in (publisher, subscriber):
            await backend.connect(settings)
        got: list[Event] = []

        async def handle(event: Event) -> None:
            got.append(event)
            await subscriber.acknowledge(event.id)

        await subscriber.subscribe([], handle)
        async with open_client(settings) as client:
            await client.flushall()
        event = created("after")
        await publisher.publish(event)
        await eventually(lambda: got)
        assert got == [event]
        for backend in (publisher, subscriber):
            await backend.close()
