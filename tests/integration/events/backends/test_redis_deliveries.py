"""How often an event of a Redis stream is delivered before it is a dead letter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from libs.events.backends import open_backend
from libs.events.deliveries import end_task
from libs.events.redis.connection import HOLD_MS, READ_COUNT, open_client
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.event_stream import EventStream
from libs.events.settings import RedisSettings
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event, encode_event
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import created, persist
from tests.integration.events.conftest import EVENTUALLY_S, eventually

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture
async def settings(tmp_path: Path) -> AsyncIterator[RedisSettings]:
    with running(RedisServer(tmp_path, "streams")) as server:
        yield server.settings("counts")


@pytest.fixture
async def client(settings: RedisSettings) -> AsyncIterator[Any]:
    opened = open_client(settings)
    yield opened
    await opened.aclose()


async def started(client: Any, settings: RedisSettings, consumer: str = "reader") -> EventStream:
    stream = EventStream(client, settings, consumer, DeadLetters(client, "counts"))
    await stream.start(frozenset())
    return stream


class Got(list[Event]):
    """What a handler got that acknowledges nothing."""

    async def handle(self, event: Event) -> None:
        self.append(event)


async def dead_letters(client: Any) -> list[tuple[bytes, int]]:
    """Events among the dead letters, and how often each was delivered."""
    entries = await client.xrange("counts:dead-letter")
    return [(fields[b"data"], int(fields[b"deliveries"])) for _, fields in entries]


@pytest.mark.parametrize("max_retries", [0, 2])
async def test_an_event_that_ends_its_consumers_buries_none_of_those_read_with_it(
    settings: RedisSettings, client: Any, monkeypatch: pytest.MonkeyPatch, max_retries: int
) -> None:
    # Given consumers that count as dead soon, and events of one read
    monkeypatch.setattr("libs.events.redis.streams.HOLD_MS", 50)
    monkeypatch.setattr("libs.events.redis.streams.RECLAIM_S", 0)
    monkeypatch.setattr("libs.events.redis.event_stream.BLOCK_MS", 10)
    settings = replace(settings, max_retries=max_retries)
    poison, *good = [created(f"{number}") for number in range(READ_COUNT)]
    got: list[Event] = []

    async def deliver(consumer: str) -> None:
        """Until the poison comes, or is a dead letter and all others have come."""
        stream = EventStream(client, settings, consumer, DeadLetters(client, "counts"))
        ended = asyncio.Event()

        async def handle(event: Event) -> None:
            got.append(event)
            if event == poison:
                ended.set()
                await asyncio.Event().wait()
            await stream.acknowledge(event.id)

        delivering = asyncio.create_task(stream.deliver(frozenset(), handle, lambda: None))
        while not ended.is_set() and not await is_over():
            await asyncio.sleep(0.01)
        await end_task(delivering)

    async def is_over() -> bool:
        return len(await dead_letters(client)) + len({event.id for event in got}) > len(good) + 1

    # When the first one dies with the first of them, and so does each that gets it then
    stream = await started(client, settings, "publisher")
    await stream.publish([poison, *good])
    async with asyncio.timeout(EVENTUALLY_S):
        while not await is_over():
            await deliver(f"consumer {len(got)}")

    # Then only that one becomes a dead letter, and each of the others comes once
    assert await dead_letters(client) == [(encode_event(poison), max_retries + 1)]
    assert [event for event in got if event != poison] == good
    # One more than that: the first consumer may have died before its handler had it
    assert got.count(poison) == max_retries + 2


async def test_an_event_that_is_always_refused_is_delivered_as_often_as_the_settings_say(
    settings: RedisSettings, client: Any
) -> None:
    settings = replace(settings, retry_delay_ms=1)
    stream = await started(client, settings)
    event = created("refused")
    got = Got()

    await stream.publish([event])
    delivering = asyncio.create_task(stream.deliver(frozenset(), got.handle, lambda: None))
    async with asyncio.timeout(EVENTUALLY_S):
        while not (found := await dead_letters(client)):
            await asyncio.sleep(0.01)
    await end_task(delivering)
    assert got == [event] * (settings.max_retries + 1)
    assert found == [(encode_event(event), settings.max_retries + 1)]


async def test_each_copy_of_an_event_that_was_published_twice_has_its_own_deliveries(
    settings: RedisSettings, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two copies, neither acknowledged, of an event that may not be delivered again
    monkeypatch.setattr("libs.events.redis.event_stream.BLOCK_MS", 10)
    monkeypatch.setattr("libs.events.redis.streams.RECLAIM_S", 0)
    settings = replace(settings, max_retries=0, retry_delay_ms=60_000)
    stream = await started(client, settings)
    event = created("twice")
    got = Got()

    async def pending() -> list[bytes]:
        """The entries of copies that are neither acknowledged nor dead letters."""
        rows = await client.xpending_range("counts:events", settings.consumer_group, "-", "+", 10)
        return [row["message_id"] for row in rows]

    await stream.publish([event, event])
    delivering = asyncio.create_task(stream.deliver(frozenset(), got.handle, lambda: None))
    try:
        # Then the second one is delivered as often as the first
        async with asyncio.timeout(EVENTUALLY_S):
            while len(got) + len(await dead_letters(client)) < 2:
                await asyncio.sleep(0.01)
        assert got == [event, event]

        # When the first one comes back from another consumer, it becomes a dead letter
        first, second = await pending()
        await client.xclaim(
            "counts:events",
            settings.consumer_group,
            "another",
            min_idle_time=0,
            message_ids=[first],
            idle=HOLD_MS,
            retrycount=2,
            justid=True,
        )
        async with asyncio.timeout(EVENTUALLY_S):
            while await pending() != [second]:
                await asyncio.sleep(0.01)
        assert await dead_letters(client) == [(encode_event(event), 1)]
    finally:
        await end_task(delivering)

    # And the second one can still be acknowledged
    await stream.acknowledge(event.id)
    assert await pending() == []


async def test_an_event_is_acknowledged_by_the_call_that_repeats_one_in_an_outage(
    tmp_path: Path,
) -> None:
    with running(RedisServer(tmp_path, "streams")) as server:
        # Given an event that its handler has, and an acknowledgement that was refused
        backend = open_backend("redis")
        settings = replace(server.settings("counts"), retry_delay_ms=60_000)
        await backend.connect(settings)
        got = Got()
        await backend.subscribe([], got.handle)
        event = created("once more")
        await backend.publish(event)
        await eventually(lambda: got)
        await asyncio.to_thread(server.kill)
        with pytest.raises(Unavailable):
            await backend.acknowledge(event.id)
        await asyncio.to_thread(server.start)

        # When it is repeated until it is answered, then the event is finished
        await persist(lambda: backend.acknowledge(event.id))
        async with open_client(settings) as client:
            assert (await client.xpending("counts:events", settings.consumer_group))["pending"] == 0
        await backend.close()


@pytest.mark.parametrize("has_other", [False, True])
async def test_a_refused_event_waits_for_its_delay_however_long_that_is(
    settings: RedisSettings, client: Any, monkeypatch: pytest.MonkeyPatch, has_other: bool
) -> None:
    # Given a consumer whose handler has refused an event, and perhaps another one of its group
    monkeypatch.setattr("libs.events.redis.streams.HOLD_MS", 5_000)
    monkeypatch.setattr("libs.events.redis.streams.KEEP_S", 0.05)
    monkeypatch.setattr("libs.events.redis.streams.RECLAIM_S", 0)
    monkeypatch.setattr("libs.events.redis.event_stream.BLOCK_MS", 50)
    settings = replace(settings, retry_delay_ms=86_400_000)
    refused, left = created("refused"), created("left")
    stream = await started(client, settings)
    got = Got()
    delivering = [asyncio.create_task(stream.deliver(frozenset(), got.handle, lambda: None))]
    await stream.publish([refused])
    await eventually(lambda: got)
    await end_task(delivering.pop())

    # When a dead consumer has got the next one, and that comes to one of them
    await stream.publish([left])
    await client.xreadgroup(settings.consumer_group, "dead", {"counts:events": ">"})
    streams = [stream]
    if has_other:
        streams.append(await started(client, settings, "other"))
    for one in streams:
        deliver = one.deliver(frozenset(), got.handle, lambda: None)
        delivering.append(asyncio.create_task(deliver))
    await eventually(lambda: left in got)

    # Then the one that was refused, which waits for longer, has not come again
    assert got == [refused, left]
    for task in delivering:
        await end_task(task)


async def test_a_connection_that_is_made_again_counts_as_no_delivery(
    settings: RedisSettings, client: Any
) -> None:
    # Given an event that waits for its next attempt
    settings = replace(settings, retry_delay_ms=60_000)
    stream = await started(client, settings)
    await stream.publish([created("waits")])
    got = Got()

    # When its consumer connects again and again
    for _ in range(5):
        up = asyncio.Event()
        delivering = asyncio.create_task(stream.deliver(frozenset(), got.handle, up.set))
        await eventually(lambda: got)
        await eventually(up.is_set)
        await end_task(delivering)

    # Then that is still its first one
    (pending,) = await client.xpending_range("counts:events", settings.consumer_group, "-", "+", 10)
    assert pending["times_delivered"] == len(got) == 1


async def consumers_of_pending(client: Any, settings: RedisSettings) -> list[bytes]:
    rows = await client.xpending_range("counts:events", settings.consumer_group, "-", "+", 10)
    return [row["consumer"] for row in rows]


async def test_an_event_that_another_consumer_took_over_stays_with_that_one(
    settings: RedisSettings, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a consumer with three events: one waits for its next attempt, one is being handled
    monkeypatch.setattr("libs.events.redis.streams.KEEP_S", 0)
    monkeypatch.setattr("libs.events.deliveries.KEEP_S", 0.01)
    monkeypatch.setattr("libs.events.redis.event_stream.BLOCK_MS", 10)
    settings = replace(settings, retry_delay_ms=1)
    refused, handled, unread, last = (created(name) for name in ("a", "b", "c", "d"))
    stream = await started(client, settings)
    got: list[Event] = []
    goes_on = asyncio.Event()

    async def handle(event: Event) -> None:
        got.append(event)
        if event == handled:
            await goes_on.wait()
        if event == last:
            await stream.acknowledge(event.id)

    await stream.publish([refused, handled, unread])
    delivering = asyncio.create_task(stream.deliver(frozenset(), handle, lambda: None))
    await eventually(lambda: handled in got)

    # When it stands still, and another one takes all of them over
    rows = await client.xpending_range("counts:events", settings.consumer_group, "-", "+", 10)
    entry_ids = [row["message_id"] for row in rows]
    await client.xclaim("counts:events", settings.consumer_group, "other", 0, entry_ids)
    await eventually(lambda: not stream._held)
    goes_on.set()

    # Then it takes none back, delivers none, and goes on with what comes
    await stream.publish([last])
    await eventually(lambda: last in got)
    assert got == [refused, handled, last]
    await end_task(delivering)
    assert await consumers_of_pending(client, settings) == [b"other"] * 3
    assert not stream._due_at


async def test_an_event_whose_acknowledgement_lost_its_answer_is_held_no_more(
    settings: RedisSettings, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an event that waits for its next attempt
    monkeypatch.setattr("libs.events.redis.event_stream.BLOCK_MS", 10)
    settings = replace(settings, retry_delay_ms=86_400_000)
    stream = await started(client, settings)
    got = Got()
    await stream.publish([created("acknowledged")])
    delivering = asyncio.create_task(stream.deliver(frozenset(), got.handle, lambda: None))
    await eventually(lambda: stream._due_at)

    # When Redis has acknowledged it, which its consumer does not know
    (held,) = stream._held.values()
    assert await client.xack("counts:events", settings.consumer_group, held.entry_id) == 1
    stream._due_at[held.entry_id] = 0.0

    # Then it is held until its next attempt is due, and no longer
    await eventually(lambda: not stream._due_at)
    await eventually(lambda: not stream._held)
    assert len(got) == 1
    await end_task(delivering)
