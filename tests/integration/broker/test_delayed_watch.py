"""Watching the delayed messages of a queue, over restarts, purges and cleaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from libs.storage.delayed_records import decode_delayed
from libs.storage.keys import RecordType, key_head
from libs.storage.own_keys import parse_delayed_key
from services.broker import delayed_cleaning, delayed_watch
from services.broker.delayed_cleaning import DelayedCleaner
from services.broker.delayed_watch import DelayedWatches, Update
from services.broker.queue_machine import Queue
from slatemq.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from slatemq.v1 import queue_pb2
from tests.integration.broker.rig import Ingest, Rig, running
from tests.manual_clock import ManualClock

MINUTE = 60_000
YEAR = 365 * 24 * 60 * MINUTE


def watches(rig: Rig, **settings: Any) -> DelayedWatches:
    assert rig.service._database is not None
    return DelayedWatches(rig.owner, rig.service._database, rig.ingest, **settings)


class Watch:
    """What one observer has seen. Heartbeats are passed over."""

    def __init__(self, updates: AsyncIterator[Update], position: str) -> None:
        self._updates = updates
        self.position = position
        self.seen: list[delayed_watch.Watched] = []

    async def until(self, count: int) -> list[int]:
        """The IDs of all seen, as soon as they are so many."""
        async with asyncio.timeout(60):
            while len(self.seen) < count:
                self._take(await anext(self._updates))
        return [one.told.message_id for one in self.seen]

    async def heartbeat(self) -> list[int]:
        """The IDs of all seen up to the next update that brings none."""
        async with asyncio.timeout(60):
            while self._take(await anext(self._updates)):
                pass
        return [one.told.message_id for one in self.seen]

    def _take(self, update: Update) -> int:
        self.seen += update.messages
        self.position = update.position
        return len(update.messages)


@asynccontextmanager
async def watching(
    rig: Rig,
    position: str = "",
    queue_id: str = "q",
    *,
    with_messages: bool = False,
    **settings: Any,
) -> AsyncIterator[Watch]:
    settings.setdefault("heartbeat_s", 0.05)
    updates = watches(rig, **settings).watch(queue_id, position, with_messages=with_messages)
    async with aclosing(updates):
        yield Watch(updates, position)


async def delay(rig: Rig, ids: Sequence[int], by_ms: int = MINUTE, queue_id: str = "q") -> None:
    visible = [rig.clock.now_ms() + by_ms] * len(ids)
    await rig.assign(ids, queue_id, visible_at_ms=visible)


async def rows(rig: Rig) -> list[tuple[str, int | None]]:
    """Queue and order of every row of every journal."""
    assert rig.service._database is not None
    head = key_head(RecordType.DELAYED)
    found = []
    async for some in rig.service._database.scan(head, head + b"\xff", durable=True):
        found += [tuple(parse_delayed_key(key)) for key, _ in some]
    return found  # type: ignore[return-value]


async def test_delayed_messages_are_told_in_order_both_those_there_and_those_to_come() -> None:
    async with running() as rig:
        await rig.create()
        await delay(rig, [3, 1], 9 * MINUTE)
        await rig.assign([4])
        await delay(rig, [2])
        async with watching(rig) as watch:
            assert await watch.until(3) == [3, 1, 2]
            told = watch.seen[0].told
            assert told.visible_at_ms == rig.clock.now_ms() + 9 * MINUTE
            assert watch.seen[0].message is None
            for message_id in range(10, 20):
                await delay(rig, [message_id], message_id * MINUTE)
            await rig.assign([30])
            assert await watch.until(13) == [3, 1, 2, *range(10, 20)]
            assert await watch.heartbeat() == [3, 1, 2, *range(10, 20)]


async def test_a_watch_is_taken_up_after_the_last_answer_also_after_a_restart(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await delay(rig, [1, 2])
        async with watching(rig) as watch:
            assert await watch.until(2) == [1, 2]
            assert len(watch.position) <= 64
            position = watch.position
        await delay(rig, [3])
        async with watching(rig, position) as watch:
            assert await watch.until(1) == [3]
    async with running(tmp_path, clock) as rig:
        await delay(rig, [4])
        async with watching(rig, position) as watch:
            assert await watch.until(2) == [3, 4]
            assert await watch.heartbeat() == [3, 4]
        async with watching(rig, watch.position) as again:
            assert await again.heartbeat() == []


async def test_a_page_may_end_within_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_watch, "PAGE_MESSAGES", 3)
    monkeypatch.setattr(delayed_watch, "PAGE_ROWS", 2)
    async with running() as rig:
        await rig.create()
        for first in (1, 11, 21, 31, 41):
            await delay(rig, range(first, first + 5))
        everything = [first + n for first in (1, 11, 21, 31, 41) for n in range(5)]
        # One answer for each watch: every position is one to go on from.
        position = ""
        seen: list[int] = []
        while len(seen) < len(everything):
            async with watching(rig, position) as watch:
                seen += await watch.until(1)
                position = watch.position
        assert seen == everything


async def test_what_can_be_claimed_is_left_out() -> None:
    async with running() as rig:
        await rig.create()
        await delay(rig, [1], 2 * MINUTE)
        await delay(rig, [2], MINUTE)
        await delay(rig, [3], 3 * MINUTE)
        rig.clock.advance(MINUTE)
        async with watching(rig) as watch:
            assert await watch.heartbeat() == [1, 3]
            assert await rig.claim(max_messages=9)
        ends = [rig.clock.now_ms() + MINUTE]
        await rig.assign(
            [4], visible_at_ms=[rig.clock.now_ms() + YEAR], retention_deadlines_ms=ends
        )
        rig.clock.advance(2 * MINUTE)
        async with watching(rig) as watch:
            assert await watch.heartbeat() == []


async def test_nothing_is_told_before_it_is_durable() -> None:
    async with running() as rig:
        await rig.create()
        async with watching(rig) as watch:
            assert await watch.heartbeat() == []
            rig.disk.free.clear()
            assigning = asyncio.create_task(delay(rig, [1]))
            async with asyncio.timeout(30):
                while not rig.owner.shard.queues["q"].timed_count:
                    await asyncio.sleep(0.001)
            for _ in range(3):
                assert await watch.heartbeat() == []
            rig.disk.free.set()
            await assigning
            assert await watch.until(1) == [1]


async def test_messages_come_with_their_content_and_etag() -> None:
    ingest = Ingest()
    ingest.gone = {3}
    ingest.header_bytes = 5
    async with running(ingest=ingest) as rig:
        await rig.create()
        await delay(rig, [2, 3, 1])
        async with watching(rig, with_messages=True) as watch:
            assert await watch.until(3) == [2, 3, 1]
        second, third, first = watch.seen
        assert second.message is not None
        assert second.message.payload == b"%010d" % 2
        assert second.message.headers == {"big": "xxxxx"}
        assert second.etag == "e2"
        assert (third.message, third.etag) == (None, "")
        assert first.message is not None
        assert first.message.message_id == 1


async def test_answers_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delayed_watch, "PAGE_BYTES", 5000)
    ingest = Ingest()
    ingest.sizes = dict.fromkeys(range(1, 21), 2000) | {4: 9000}
    async with running(ingest=ingest) as rig:
        await rig.create()
        await delay(rig, range(1, 21))
        updates = watches(rig).watch("q", "", with_messages=True)
        async with aclosing(updates), asyncio.timeout(60):
            sizes: list[int] = []
            while sum(sizes) < 20:
                sizes.append(len((await anext(updates)).messages))
        assert max(sizes) == 2
        assert 1 in sizes


async def test_an_ingest_that_is_away_ends_the_watch_and_it_goes_on_later() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        await delay(rig, [1])
        async with watching(rig, with_messages=True) as watch:
            assert await watch.until(1) == [1]
            ingest.away = True
            await delay(rig, [2])
            with pytest.raises(Unavailable):
                await watch.until(2)
        ingest.away = False
        async with watching(rig, watch.position, with_messages=True) as again:
            assert await again.until(1) == [2]


async def test_a_purge_takes_the_delayed_messages_out_of_the_watch() -> None:
    async with running() as rig:
        await rig.create()
        await delay(rig, [1])
        async with watching(rig) as watch:
            assert await watch.until(1) == [1]
            position = watch.position
            await delay(rig, [2])
            queue = rig.owner.shard.queues["q"]
            await rig.owner.run(lambda _: queue.purge_available())
            await delay(rig, [3])
            assert 3 in await watch.until(2)
        for begin in ("", position):
            async with watching(rig, begin) as watch:
                assert await watch.heartbeat() == [3]


async def test_the_watch_of_a_deleted_queue_ends_and_its_rows_go() -> None:
    async with running() as rig:
        await rig.create()
        await delay(rig, [1])
        async with watching(rig) as watch:
            assert await watch.until(1) == [1]
            await rig.queues.DeleteQueue(queue_pb2.DeleteQueueRequest(queue_id="q"))
            with pytest.raises(NotFound):
                await watch.until(2)
        async with asyncio.timeout(60):
            while await rows(rig):
                await asyncio.sleep(0.01)
        await rig.create()
        async with watching(rig, watch.position) as watch:
            assert await watch.heartbeat() == []


async def test_an_unknown_queue_and_a_strange_position_are_refused() -> None:
    async with running() as rig:
        await rig.create()
        await rig.create("other")
        with pytest.raises(NotFound):
            async with watching(rig, queue_id="nowhere") as watch:
                await watch.heartbeat()
        async with watching(rig) as watch:
            await watch.heartbeat()
        cut = watch.position[:-1]
        for position in ("x", cut, watch.position + "=", watch.position.swapcase(), "A" * 24):
            with pytest.raises(InvalidArgument) as refused:
                async with watching(rig, position) as strange:
                    await strange.heartbeat()
            assert (refused.value.field, refused.value.reason) == ("position", "INVALID_POSITION")
        with pytest.raises(InvalidArgument):
            async with watching(rig, watch.position, "other") as strange:
                await strange.heartbeat()


async def test_streams_are_bounded_and_end_with_the_broker() -> None:
    async with running() as rig:
        await rig.create()
        streams = watches(rig, streams_max=2)
        open_ = [streams.watch("q", "", with_messages=False) for _ in range(3)]
        async with aclosing(open_[0]), aclosing(open_[1]), aclosing(open_[2]):
            await anext(open_[0])
            await anext(open_[1])
            with pytest.raises(ResourceExhausted):
                await anext(open_[2])
            await open_[0].aclose()
            again = streams.watch("q", "", with_messages=False)
            async with aclosing(again):
                await anext(again)
                waiting = asyncio.create_task(anext(again))
                await asyncio.sleep(0)
                streams.drain()
                with pytest.raises(Unavailable):
                    await waiting
                with pytest.raises(Unavailable):
                    await anext(open_[1])


# --- Cleaning ---------------------------------------------------------------


def cleaner(rig: Rig) -> DelayedCleaner:
    assert rig.service._database is not None
    return DelayedCleaner(rig.owner, rig.service._database, rig.clock.now_ms())


async def clean_for(rig: Rig, cleaning: DelayedCleaner, minutes: int) -> None:
    for _ in range(minutes):
        rig.clock.advance(MINUTE)
        await cleaning.clean()


async def test_rows_whose_messages_can_be_claimed_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delayed_cleaning, "ROWS", 2)
    monkeypatch.setattr(delayed_cleaning, "LOOK_S", 3600)  # the broker's own leaves it to us
    async with running() as rig:
        await rig.create()
        cleaning = cleaner(rig)
        for minutes in (200 * YEAR // MINUTE, 1, 3, 1, 10, 1, 1):
            await delay(rig, [minutes], minutes * MINUTE)
        assert len(await rows(rig)) == 7
        await clean_for(rig, cleaning, 2)
        assert len(await rows(rig)) == 3
        await clean_for(rig, cleaning, 6)
        assert len(await rows(rig)) == 2
        # At the latest when it is twice as old as its delay was, and a minute.
        await clean_for(rig, cleaning, 13)
        assert len(await rows(rig)) == 1
        async with watching(rig) as watch:
            assert await watch.heartbeat() == [200 * YEAR // MINUTE]


async def test_a_row_that_waits_long_is_seldom_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    decode = decode_delayed

    def counted(value: bytes) -> Any:
        nonlocal looked
        looked += 1
        return decode(value)

    monkeypatch.setattr(delayed_cleaning, "decode_delayed", counted)
    monkeypatch.setattr(delayed_cleaning, "LOOK_S", 3600)  # the broker's own leaves it to us
    async with running() as rig:
        await rig.create()
        cleaning = cleaner(rig)
        await delay(rig, [1], 100 * YEAR)
        await clean_for(rig, cleaning, 600)
        assert looked <= 11
        # One that stood still, for a night or for years, looks once.
        looked = 0
        for pause in (700, 100_000, 10 * YEAR // MINUTE):
            rig.clock.advance(pause * MINUTE)
            await cleaning.clean()
        assert looked <= 3
        assert len(await rows(rig)) == 1


async def test_what_is_known_to_be_empty_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_for: list[str] = []
    find_last = DelayedCleaner._find_last

    async def noted(self: DelayedCleaner, queue: Queue) -> None:
        looked_for.append(queue.queue_id)
        await find_last(self, queue)

    monkeypatch.setattr(DelayedCleaner, "_find_last", noted)
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.create("purged")
        rig.owner.shard.queues["purged"].purge_available()
        await clean_for(rig, cleaner(rig), 3)
    assert looked_for == []
    async with running(tmp_path, clock) as rig:
        await clean_for(rig, cleaner(rig), 3)
    assert set(looked_for) == {"q", "purged"}  # of an earlier run


async def test_cleaning_goes_on_after_a_restart(tmp_path: Path) -> None:
    async def left(count: int) -> None:
        async with asyncio.timeout(60):
            while len(await rows(rig)) != count:
                await asyncio.sleep(0.01)

    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        await rig.create("none")
        await delay(rig, [1], 5 * MINUTE)
        await delay(rig, [2], 500 * MINUTE)
    clock.advance(30 * MINUTE)
    async with running(tmp_path, clock) as rig:
        await left(1)
        async with watching(rig) as watch:
            assert await watch.heartbeat() == [2]
        clock.advance(1000 * MINUTE)
        await left(0)
