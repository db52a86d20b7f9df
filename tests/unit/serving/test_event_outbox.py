"""Events in a database: which come, when, and again after a kill at any step."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from libs.events.relay import BATCH_EVENTS, EventBatch, Relay
from libs.events.settings import QueueSettings
from libs.serving.events import outbox as event_outbox
from libs.serving.events.outbox import EventOutbox, Happening, OutboxEvents
from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StorageError
from libs.storage.layout.own_keys import events_key
from libs.storage.layout.primitives import RowChange
from slatemq.errors import InvalidArgument, SlateMQError, Unavailable
from slatemq.events.catalogue import MessageDeadLettered, QueueDeleted, data_of
from slatemq.events.envelope import Event, derive_event_id, format_timestamp

AT_MS = 1_767_225_600_000


class Owner:
    """Commits at once what a test records."""

    def __init__(self, database: Database, events: OutboxEvents) -> None:
        self.database = database
        self.events = events
        self.written: list[RowChange] = []
        self._committing = asyncio.Lock()

    @property
    def outbox(self) -> EventOutbox:
        return self.events.outbox

    def record(self, *names: str, request_id: str = "") -> None:
        deleted = [Happening(AT_MS + n, QueueDeleted(queue=one)) for n, one in enumerate(names)]
        self.outbox.record(deleted, request_id)

    async def commit(self) -> None:
        async with self._committing:
            batch = Batch()
            batch.put_all([*self.outbox.take_rows(), *self.written])
            self.written.clear()
            if len(batch):
                await self.database.write(batch)
                await self.database.flush()

    async def take(self, *, done: bool = True) -> list[EventBatch]:
        """What waits; published, or not."""
        found: list[EventBatch] = []
        last = self.outbox.last_number
        if not self.events.waits:
            return found
        async with aclosing(self.events.batches()) as batches:
            async for batch in batches:
                found.append(batch)
                if not done:
                    break
                self.events.done(batch.position)
                if batch.position >= last:
                    break
        return found


@asynccontextmanager
async def opened(root: Root, *, from_end: bool = False) -> AsyncIterator[Owner]:
    """An owner that ends as if it was killed: what it has not committed is gone."""
    database = await root.database("broker/0", Kind.BROKER)
    try:
        owner: Owner

        async def durable() -> None:
            await owner.commit()

        def write(rows: Sequence[RowChange]) -> None:
            owner.written += rows

        events = await OutboxEvents.open("broker-0", database, durable, write, from_end=from_end)
        owner = Owner(database, events)
        yield owner
    finally:
        await database.close()


@pytest.fixture
def root() -> Root:
    return open_root("memory:///")


def names_of(batches: Sequence[EventBatch]) -> list[str]:
    return [event.data["queue"] for batch in batches for event in batch.events]


def ids_of(batches: Sequence[EventBatch]) -> list[str]:
    return [event.id for batch in batches for event in batch.events]


async def test_an_event_says_what_happened_when_where_and_for_whom(root: Root) -> None:
    async with opened(root) as owner:
        owner.record("orders", request_id="req-1")
        [batch] = await owner.take()

    [event] = batch.events
    assert data_of(event) == QueueDeleted(queue="orders")
    assert (event.source, event.request_id) == ("broker-0", "req-1")
    assert event.timestamp == format_timestamp(AT_MS)
    assert batch.began_ms == AT_MS


async def test_events_come_in_order_until_their_rows_are_deleted_always_with_their_ids(
    root: Root,
) -> None:
    async with opened(root) as owner:
        owner.record("a")
        owner.record("b", "c")
        await owner.commit()
        owner.record("never committed")
        # Killed before the commit of the last one.
    async with opened(root) as owner:
        unsent = await owner.take(done=False)  # killed before it was sent
    async with opened(root) as owner:
        sent = await owner.take()  # killed before the rows were deleted
    async with opened(root) as owner:
        again = await owner.take()
        owner.events.save()
        await owner.commit()
    async with opened(root) as owner:
        assert await owner.take() == []
        owner.record("d")
        await owner.commit()
        later = await owner.take()

    assert names_of(unsent) == names_of(sent) == names_of(again) == ["a", "b", "c"]
    assert ids_of(unsent) == ids_of(sent) == ids_of(again)
    assert names_of(later) == ["d"]
    assert len({*ids_of(sent), *ids_of(later)}) == 4


async def test_rows_are_deleted_one_by_one_as_their_events_are_published(root: Root) -> None:
    async with opened(root) as owner:
        for name in "abc":
            owner.outbox.record(
                [Happening(AT_MS, QueueDeleted(queue=name))], after=ord(name)
            )  # each a batch of its own
        async with aclosing(owner.events.batches()) as batches:
            owner.events.done((await anext(batches)).position)
        assert owner.events.lag == 2
        owner.events.save()
        await owner.commit()
    async with opened(root) as owner:
        assert owner.events.lag == 2
        assert names_of(await owner.take()) == ["b", "c"]


async def test_many_events_of_one_command_are_bounded_rows_and_bounded_batches(root: Root) -> None:
    dead_letters = [
        Happening(
            AT_MS, MessageDeadLettered(message_id=n, queue="q", attempts=3, reason="x" * 1024)
        )
        for n in range(10_000)
    ]
    async with opened(root) as owner:
        owner.outbox.record(dead_letters)
        rows = owner.outbox.take_rows()
        assert max(len(value) for _, value in rows if value) < 256 << 10
        batch = Batch()
        batch.put_all(rows)
        await owner.database.write(batch)
        await owner.database.flush()
        found = await owner.take()

    assert max(len(batch.events) for batch in found) == BATCH_EVENTS
    assert [event.data["message_id"] for batch in found for event in batch.events] == list(
        range(10_000)
    )
    assert len(set(ids_of(found))) == 10_000


async def test_what_is_skipped_is_deleted_without_events(root: Root) -> None:
    async with opened(root) as owner:
        owner.record("a")
        await owner.commit()
    async with opened(root, from_end=True) as owner:
        assert owner.events.lag == 0
        owner.record("b")
        await owner.commit()
        assert names_of(await owner.take()) == ["b"]
        owner.events.save()
        await owner.commit()
    async with opened(root) as owner:
        assert await owner.take() == []


async def test_a_damaged_row_is_passed_over(root: Root) -> None:
    async with opened(root) as owner:
        for name in "abc":
            owner.record(name)
        await owner.commit()
        await damage(owner, 2)
        assert names_of(await owner.take()) == ["a", "c"]


async def damage(owner: Owner, number: int) -> None:
    """Put what is no row in the place of the one that begins with this event."""
    batch = Batch()
    batch.put(events_key(number), b"\x00")
    await owner.database.write(batch)
    await owner.database.flush()


async def test_a_damaged_last_row_of_many_events_holds_up_nothing(root: Root) -> None:
    async with opened(root) as owner:
        owner.record("a")
        owner.record(*"bcdef")
        await owner.commit()
        await damage(owner, 2)
        # Then its number comes, without events: who waits for what is there need not wait for more
        async with asyncio.timeout(60):
            assert names_of(await owner.take()) == ["a"]
        assert not owner.events.waits
        owner.record("g")
        assert names_of(await owner.take()) == ["g"]


async def test_the_loop_turns_between_two_rows_of_many_events(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = 0
    made: Counter[int] = Counter()

    def counting(*given: Any) -> str:
        made[turns] += 1
        return derive_event_id(*given)

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(event_outbox, "derive_event_id", counting)
    async with opened(root) as owner:
        owner.record(*map(str, range(8 * BATCH_EVENTS)))
        await owner.commit()
        turning = asyncio.create_task(turn())
        await owner.take()
        turning.cancel()

    assert made.total() == 8 * BATCH_EVENTS
    assert max(made.values()) == BATCH_EVENTS


class Backend:
    """Takes events while it is up."""

    def __init__(self) -> None:
        self.up = asyncio.Event()
        self.events: list[Event] = []
        self.refusal: SlateMQError | None = None
        self.closed_count = 0

    async def connect(self, config: Any) -> None:
        """Always there, but for what it is asked to take."""
        if self.refusal is not None:
            raise self.refusal

    async def close(self) -> None:
        self.closed_count += 1

    async def publish_batch(self, events: Sequence[Event]) -> None:
        if not self.up.is_set():
            raise Unavailable("down")
        self.events += events


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("consistency", ["write-through", "fire-and-forget"])
async def test_a_relay_publishes_when_the_backend_is_back_what_its_mode_keeps(
    root: Root, consistency: Any
) -> None:
    backend: Any = Backend()
    settings = QueueSettings(enabled=True, backend="redis", consistency=consistency)
    async with opened(root) as owner:
        relay = Relay(settings, backend, owner.events, (StorageError,))
        running = asyncio.create_task(relay.run())
        owner.record("a", "b")
        await owner.commit()
        await until(lambda: relay.counts.failed > 0)
        backend.up.set()
        await until(lambda: not owner.events.lag)
        owner.record("c")
        await until(lambda: not owner.events.lag)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    kept = ["a", "b"] if consistency == "write-through" else []
    assert [event.data["queue"] for event in backend.events] == [*kept, "c"]
    assert relay.counts.dropped == (0 if kept else 2)


async def test_a_relay_connects_to_a_backend_that_begins_later_though_nothing_is_published(
    root: Root,
) -> None:
    backend: Any = Backend()
    backend.refusal = Unavailable("down")
    async with opened(root) as owner:
        relay = Relay(QueueSettings(enabled=True, backend="redis"), backend, owner.events)
        running = asyncio.create_task(relay.run())
        await until(lambda: relay.counts.error != "")
        assert not relay.is_open

        backend.refusal = None
        await until(lambda: relay.is_open)
        assert relay.counts.connected
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert backend.closed_count > 1  # the try that failed, and the connection


async def test_a_setting_that_is_refused_after_an_outage_is_an_error_until_it_is_taken(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    def errors() -> list[str]:
        return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]

    backend: Any = Backend()
    backend.up.set()
    backend.refusal = Unavailable("down")
    async with opened(root) as owner:
        relay = Relay(QueueSettings(enabled=True, backend="redis"), backend, owner.events)
        running = asyncio.create_task(relay.run())
        await until(lambda: relay.counts.error != "")
        assert (relay.counts.refusal, errors()) == ("", [])

        backend.refusal = InvalidArgument("queue.redis.url", "is wrong")
        owner.record("a")
        await owner.commit()
        await until(lambda: relay.counts.failed > 2)
        assert "queue.redis.url: is wrong" in relay.counts.refusal
        assert ["queue.redis.url: is wrong" in one for one in errors()] == [True]
        assert not running.done()

        backend.refusal = None
        await until(lambda: not owner.events.lag)
        assert relay.counts.refusal == ""
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
