"""Removing the events of a Redis stream that every group has finished."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from libs.events.deliveries import end_task
from libs.events.redis.connection import open_client
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.event_stream import EventStream
from libs.events.settings import RedisSettings
from slatemq.events.envelope import Event
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import created
from tests.integration.events.conftest import EVENTUALLY_S, eventually, in_group

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture
async def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RedisSettings]:
    """Of subscribers that remove what is finished after each event."""
    monkeypatch.setattr("libs.events.redis.event_stream.TRIM_AFTER", 1)
    with running(RedisServer(tmp_path, "streams")) as server:
        yield server.settings("trims")


@pytest.fixture
async def client(settings: RedisSettings) -> AsyncIterator[Any]:
    async with open_client(settings) as opened:
        yield opened


async def test_events_are_removed_while_another_group_acknowledges_its_last_ones(
    settings: RedisSettings, client: Any
) -> None:
    # Given a subscriber of another type, which finishes all events, and one of all types
    dead = DeadLetters(client, "trims")
    other = EventStream(client, settings, "other", dead)
    every = EventStream(client, in_group(settings, "audit"), "every", dead)
    got: list[Event] = []

    async def handle(event: Event) -> None:
        got.append(event)
        await every.acknowledge(event.id)

    delivering = []
    for stream, types in ((other, frozenset({"object.deleted"})), (every, frozenset[str]())):
        await stream.start(types)
        delivering.append(asyncio.create_task(stream.deliver(types, handle, lambda: None)))

    # When events come one after the other, each removed as soon as it can be
    events = [created(f"{number}") for number in range(200)]
    for event in events:
        await every.publish([event])
    await eventually(lambda: len(got) == len(events) or any(one.done() for one in delivering))

    # Then all are delivered, and in the end the last one alone is left
    assert got == events
    async with asyncio.timeout(EVENTUALLY_S):
        while await client.xlen("trims:events") > 1:
            assert not any(one.done() for one in delivering)
            await asyncio.sleep(0.01)
    for one in delivering:
        await end_task(one)


async def test_an_event_is_acknowledged_to_a_redis_that_has_lost_it(
    settings: RedisSettings, client: Any
) -> None:
    stream = EventStream(client, settings, "reader", DeadLetters(client, "trims"))
    await stream.start(frozenset())
    acknowledged = asyncio.Event()

    async def handle(event: Event) -> None:
        await client.flushall()
        await stream.acknowledge(event.id)
        acknowledged.set()

    await stream.publish([created("lost")])
    delivering = asyncio.create_task(stream.deliver(frozenset(), handle, lambda: None))
    await eventually(lambda: acknowledged.is_set() or delivering.done())
    assert acknowledged.is_set()
    await end_task(delivering)
