"""Events of a shard's log: which there are, where they begin, and what purging leaves to them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from libs.events.relay import BATCH_EVENTS
from libs.events.slatemq.headers import EVENTS_HEADER, TASKS_HEADER
from libs.storage.database.roots import Root, open_root
from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge, Purged
from services.ingest.events.published_events import HEADERS_BYTES_MAX, PublishedEvents
from services.ingest.events.relay import hold_for
from services.ingest.shard import Shard
from slatemq.events.catalogue import MessagePublished, data_of
from slatemq.events.envelope import Event, format_timestamp
from slatemq.v1.ingest_pb2 import PublishRun
from tests.manual_clock import ManualClock
from tests.unit.ingest import shards
from tests.unit.ingest.shards import accepted, batch

HOUR_MS = 3_600_000
GRACE_MS = 60_000


@asynccontextmanager
async def opened(
    root: Root | None = None,
    clock: ManualClock | None = None,
    backend: str = "redis",
    **settings: Any,
) -> AsyncIterator[tuple[Shard, PublishedEvents]]:
    """A shard and its events; the cursor is saved at the end."""
    settings = {"heartbeat_ms": 20, **settings}
    async with shards.opened(root, clock, **settings) as shard:
        events = await PublishedEvents.open(shard, 0, "ingest-0", backend, from_end=False)
        yield shard, events
        events.save()


async def take(events: PublishedEvents, *, done: bool = True) -> list[Event]:
    """The events up to the end of the log, and perhaps the cursor behind them."""
    found: list[Event] = []
    if not events.lag:
        return found
    async with aclosing(events.batches()) as batches:
        async for one in batches:
            assert len(one.events) <= BATCH_EVENTS
            found += one.events
            if done:
                events.done(one.position)
            if one.position >= events._shard.log.end.last_message_id:
                break
    return found


def ids(events: list[Event]) -> list[int]:
    return [int(event.data["message_id"]) for event in events]


async def publish(shard: Shard, *messages: PublishRun) -> list[int]:
    answered = await shard.publisher.publish(accepted(*messages))
    return [answered.first_message_id + n for n in range(len(messages))]


async def test_an_event_shows_what_was_published() -> None:
    clock = ManualClock()
    async with opened(clock=clock) as (shard, events):
        at_ms = clock.now_ms()
        (first,) = await publish(
            shard,
            PublishRun(payloads=[b"abc"], headers={"queue": "orders"}, visible_at_ms=at_ms + 500),
        )
        (second,) = await publish(shard, PublishRun(payloads=[b""], delay_ms=700))
        result = await take(events)

    assert [data_of(event) for event in result] == [
        MessagePublished(
            message_id=first,
            headers={"queue": "orders"},
            size=3,
            visible_at=format_timestamp(at_ms + 500),
        ),
        MessagePublished(
            message_id=second, headers={}, size=0, visible_at=format_timestamp(at_ms + 700)
        ),
    ]
    assert {event.timestamp for event in result} == {format_timestamp(at_ms)}
    assert {event.source for event in result} == {"ingest-0"}


async def test_a_message_for_a_time_that_has_no_date_holds_up_no_event() -> None:
    async with opened() as (shard, events):
        await publish(shard, PublishRun(payloads=[b""], visible_at_ms=1 << 62))
        await publish(shard, PublishRun(payloads=[b""]))
        result = await take(events)

    assert [event.data["visible_at"] for event in result] == ["9999-12-31T23:59:59.999Z", ""]


async def test_the_request_of_an_event_is_the_trace_of_its_publish() -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    contexts = (f"00-{trace}-00f067aa0ba902b7-01", "00-short-01")
    async with opened() as (shard, events):
        for context in contexts:
            await publish(shard, PublishRun(payloads=[b"x"], headers={"traceparent": context}))
        result = await take(events)

    assert [event.request_id for event in result] == [trace, ""]


@pytest.mark.parametrize("log_cache_bytes", [0, 1 << 20], ids=["from disk", "from memory"])
async def test_every_message_has_one_event_in_the_order_of_the_log_in_bounded_batches(
    log_cache_bytes: int,
) -> None:
    async with opened(log_cache_bytes=log_cache_bytes) as (shard, events):
        wanted: list[int] = []
        for count in (1, 2, 3 * BATCH_EVENTS + 1, 5):
            wanted += await publish(shard, *(PublishRun(payloads=[b"x"]) for _ in range(count)))
        result = await take(events)

    assert ids(result) == wanted
    assert len({event.id for event in result}) == len(wanted)


async def test_events_come_again_with_their_ids_until_the_cursor_has_passed_them() -> None:
    root = open_root("memory:///")
    async with opened(root) as (shard, events):
        await publish(shard, *(PublishRun(payloads=[b"x"]) for _ in range(300)))
        first = await take(events, done=False)
    async with opened(root) as (_, events):
        again = await take(events)
    async with opened(root) as (_, events):
        assert events.lag == 0
        assert await take(events) == []

    assert again == first


async def test_the_cursor_may_stand_inside_an_entry() -> None:
    root = open_root("memory:///")
    async with opened(root) as (shard, events):
        published = await publish(shard, *(PublishRun(payloads=[b"x"]) for _ in range(300)))
        async with aclosing(events.batches()) as batches:
            one = await anext(batches)
            events.done(one.position)
        assert events.lag == 300 - BATCH_EVENTS
    async with opened(root) as (_, events):
        assert ids(await take(events)) == published[BATCH_EVENTS:]


async def test_the_first_event_is_of_the_first_message_after_events_were_turned_on() -> None:
    root = open_root("memory:///")
    async with shards.opened(root) as shard:
        await publish(shard, PublishRun(payloads=[b"before"]))
    async with opened(root) as (shard, events):
        after = await publish(shard, PublishRun(payloads=[b"after"]))
        assert ids(await take(events)) == after


async def test_what_was_published_while_events_were_off_has_its_events_when_they_are_on() -> None:
    root = open_root("memory:///")
    async with opened(root) as (shard, events):
        await publish(shard, PublishRun(payloads=[b"a"]))
        await take(events)
    async with shards.opened(root) as shard:
        missed = await publish(shard, PublishRun(payloads=[b"b"]))
    async with opened(root) as (_, events):
        assert ids(await take(events)) == missed


async def test_two_instances_give_no_id_to_two_events() -> None:
    clock = ManualClock()
    found: set[str] = set()
    for _ in range(2):
        async with opened(clock=clock) as (shard, events):
            (message_id,) = await publish(shard, PublishRun(payloads=[b"x"]))
            (event,) = await take(events)
            assert int(event.data["message_id"]) == message_id
            found.add(event.id)
    assert len(found) == 2


@pytest.mark.parametrize("header", [EVENTS_HEADER, TASKS_HEADER])
async def test_with_slatemq_as_backend_its_events_and_tasks_make_no_events(header: str) -> None:
    async with opened(backend="slatemq") as (shard, events):
        await publish(shard, PublishRun(payloads=[b""], headers={header: "slatemq"}))
        assert events.lag == 1
        assert await take(events) == []
        assert events.lag == 0


@pytest.mark.parametrize("header", [EVENTS_HEADER, TASKS_HEADER])
@pytest.mark.parametrize("backend", ["redis", "rabbitmq", "activemq", "kafka"])
async def test_with_other_backends_every_message_has_an_event(backend: str, header: str) -> None:
    async with opened(backend=backend) as (shard, events):
        wanted = await publish(shard, PublishRun(payloads=[b""], headers={header: "slatemq"}))
        assert ids(await take(events)) == wanted


async def test_headers_that_no_backend_may_take_are_left_out() -> None:
    half = "h" * (HEADERS_BYTES_MAX // 4)
    async with opened() as (shard, events):
        await publish(shard, PublishRun(payloads=[b""], headers={f"{n}": half for n in range(3)}))
        await publish(shard, PublishRun(payloads=[b""], headers={f"{n}": half for n in range(4)}))
        small, large = [data_of(event) for event in await take(events)]

    assert isinstance(small, MessagePublished)
    assert isinstance(large, MessagePublished)
    assert (len(small.headers), small.headers_omitted) == (3, False)
    assert (large.headers, large.headers_omitted) == ({}, True)


async def purge(shard: Shard, message_ids: list[int]) -> Purged:
    return await shard.purger.purge(Purge(0, Reason.EXPIRED, message_ids))


async def test_a_message_is_not_purged_before_its_event_is_published() -> None:
    clock = ManualClock()
    async with opened(clock=clock) as (shard, events):
        hold_for(shard, events, 24 * HOUR_MS)
        published = await publish(
            shard, *(PublishRun(payloads=[b"x"], retention_s=3600) for _ in range(2))
        )
        clock.advance(HOUR_MS + GRACE_MS)
        assert await purge(shard, published) == Purged(0, 0, published)
        assert ids(await take(events)) == published
        assert await purge(shard, published) == Purged(2, 2)
        assert events.lost_count == 0


async def test_messages_purged_after_the_hold_are_counted_as_lost_permanently() -> None:
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as (shard, events):
        hold_for(shard, events, 24 * HOUR_MS)
        lost = await publish(
            shard, *(PublishRun(payloads=[b"x"], retention_s=3600) for _ in range(3))
        )
        kept = await publish(shard, PublishRun(payloads=[b"y"]))
        clock.advance(24 * HOUR_MS)
        assert await purge(shard, lost) == Purged(3, 3)
        assert events.lost_count == 3
        assert ids(await take(events)) == kept
    async with opened(root, clock) as (_, events):
        assert events.lost_count == 3


async def test_a_log_that_was_purged_to_its_end_leaves_no_lag() -> None:
    clock = ManualClock()
    async with opened(clock=clock) as (shard, events):
        published = await publish(shard, PublishRun(payloads=[b"x"], retention_s=3600))
        clock.advance(2 * HOUR_MS)
        assert (await purge(shard, published)).count == 1
        assert await take(events) == []
        assert events.lag == 0


async def test_giving_up_skips_to_the_end_and_shows_how_much() -> None:
    async with opened() as (shard, events):
        await shard.publisher.publish(batch(*[b"x"] * 7))
        assert events.skip_to_end() == 7
        after = await publish(shard, PublishRun(payloads=[b"y"]))
        assert ids(await take(events)) == after
