"""Events of edits beside those of messages: their order, and that each comes, kills or not."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import pytest

from libs.serving.events.outbox import OutboxEvents
from libs.storage.database.roots import Root, open_root
from services.ingest.edit.replacing import Replacement
from services.ingest.events.published_events import PublishedEvents
from services.ingest.events.relay import ShardEvents, open_edited
from services.ingest.shard import Shard
from slatemq.errors import Aborted
from slatemq.events.catalogue import MessageEdited, data_of
from slatemq.events.envelope import Event
from tests.unit.ingest import shards
from tests.unit.ingest.shards import batch


class Rig:
    """A shard and its events."""

    def __init__(self, shard: Shard, published: PublishedEvents, edited: OutboxEvents) -> None:
        self.shard = shard
        self.events = ShardEvents(published, edited)
        self._edited = edited

    async def publish(self, *payloads: bytes) -> list[int]:
        answered = await self.shard.publisher.publish(batch(*payloads))
        return [answered.first_message_id + n for n in range(len(payloads))]

    async def edit(self, message_id: int, payload: bytes, etag: str = "") -> str:
        wanted = Replacement(message_id, etag, payload, None, "orders")
        return await self.shard.replacer.replace(wanted)

    async def take(self, *, done: bool = True) -> list[Event]:
        """What waits; with `done` nothing of it comes again."""
        found: list[Event] = []
        if not self.events.lag:
            return found
        async with aclosing(self.events.batches()) as batches:
            async for one in batches:
                found += one.events
                self.events.done(one.position)
                if not self.events.lag:
                    break
        if done:
            self.events.save()
            await self.shard.publisher.commits.durable()
        return found


@asynccontextmanager
async def opened(root: Root) -> AsyncIterator[Rig]:
    async with shards.opened(root, heartbeat_ms=20) as shard:
        published = await PublishedEvents.open(shard, 0, "ingest-0", "redis", from_end=False)
        edited = await open_edited(shard, "ingest-0", from_end=False)
        yield Rig(shard, published, edited)


@pytest.fixture
def root() -> Root:
    return open_root("memory:///")


def summaries(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.type, event.data["message_id"]) for event in events]


async def test_an_edit_has_an_event_behind_that_of_its_message_and_a_repeat_has_none(
    root: Root,
) -> None:
    async with opened(root) as rig:
        [first, second] = await rig.publish(b"a", b"b")
        etag = await rig.edit(first, b"longer")
        [third] = await rig.publish(b"c")
        with pytest.raises(Aborted):
            await rig.edit(first, b"refused", "0" * len(etag))
        found = await rig.take()

    assert summaries(found) == [
        ("message.published", first),
        ("message.published", second),
        ("message.edited", first),
        ("message.published", third),
    ]
    assert data_of(found[2]) == MessageEdited(message_id=first, queue="orders", size=6)


async def test_edits_of_a_killed_ingest_have_their_events_with_their_ids(root: Root) -> None:
    async with opened(root) as rig:
        [message] = await rig.publish(b"a")
        await rig.edit(message, b"b")
    async with opened(root) as rig:
        sent = await rig.take(done=False)
    async with opened(root) as rig:
        again = await rig.take()
    async with opened(root) as rig:
        assert await rig.take() == []

    assert summaries(sent) == [("message.published", message), ("message.edited", message)]
    assert again == sent


async def test_events_are_in_the_order_of_the_commits_whatever_that_is(root: Root) -> None:
    rng = random.Random(7)
    wanted: list[tuple[str, int]] = []
    found: list[Event] = []
    async with opened(root) as rig:
        ids: list[int] = []
        for _ in range(60):
            if ids and rng.random() < 0.4:
                message = rng.choice(ids)
                await rig.edit(message, b"%f" % rng.random())
                wanted.append(("message.edited", message))
            else:
                new = await rig.publish(*[b"x"] * rng.randrange(1, 5))
                ids += new
                wanted += (("message.published", one) for one in new)
            if rng.random() < 0.1:
                found += await rig.take()
        found += await rig.take()

    assert summaries(found) == wanted
