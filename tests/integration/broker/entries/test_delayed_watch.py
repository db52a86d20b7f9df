"""Watching the delayed messages of a queue, over restarts and purges."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from services.broker.entries import conversion as entry_conversion
from services.broker.entries import delayed as delayed_watch
from slatemq.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable
from slatemq.v1 import entry_pb2, queue_pb2
from tests.integration.broker.entries.delayed_rows import (
    MINUTE,
    YEAR,
    delay,
    rows,
    watches,
    watching,
)
from tests.integration.broker.rig import Ingest, running
from tests.manual_clock import ManualClock

FULL = entry_pb2.ENTRY_VIEW_FULL
NONE = entry_pb2.ENTRY_VIEW_UNSPECIFIED


async def test_delayed_messages_are_reported_in_order_both_those_there_and_those_to_come() -> None:
    async with running() as rig:
        await rig.create()
        await delay(rig, [3, 1], 9 * MINUTE)
        await rig.assign([4])
        await delay(rig, [2])
        async with watching(rig) as watch:
            assert await watch.until(3) == [3, 1, 2]
            value = watch.seen[0]
            assert value.visible_at_ms == rig.clock.now_ms() + 9 * MINUTE
            assert not watch.seen[0].HasField("message")
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


async def test_nothing_is_reported_before_it_is_durable() -> None:
    async with running() as rig:
        await rig.create()
        async with watching(rig) as watch:
            assert await watch.heartbeat() == []
            rig.disk.free.clear()
            assigning = asyncio.create_task(delay(rig, [1]))
            async with asyncio.timeout(60):
                while not rig.owner.shard.queues["q"].waiting.timed_count:
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
        async with watching(rig, view=FULL) as watch:
            assert await watch.until(3) == [2, 3, 1]
        second, third, first = watch.seen
        assert second.message.payload == b"%010d" % 2
        assert second.message.headers == {"big": "xxxxx"}
        assert second.etag == "e2"
        assert (third.HasField("message"), third.etag) == (False, "")
        assert first.message.message_id == 1


async def test_answers_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_conversion, "MESSAGES_BYTES_MAX", 5000)
    ingest = Ingest()
    ingest.sizes = dict.fromkeys(range(1, 21), 2000) | {4: 9000}
    async with running(ingest=ingest) as rig:
        await rig.create()
        await delay(rig, range(1, 21))
        updates = watches(rig).watch("q", "", FULL)
        async with aclosing(updates), asyncio.timeout(60):
            sizes: list[int] = []
            while sum(sizes) < 20:
                sizes.append(len((await anext(updates)).entries))
        assert max(sizes) == 2
        assert 1 in sizes


async def test_an_ingest_that_is_down_ends_the_watch_and_it_goes_on_later() -> None:
    ingest = Ingest()
    async with running(ingest=ingest) as rig:
        await rig.create()
        await delay(rig, [1])
        async with watching(rig, view=FULL) as watch:
            assert await watch.until(1) == [1]
            ingest.down = True
            await delay(rig, [2])
            with pytest.raises(Unavailable):
                await watch.until(2)
        ingest.down = False
        async with watching(rig, watch.position, view=FULL) as again:
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
        open_ = [streams.watch("q", "", NONE) for _ in range(3)]
        async with aclosing(open_[0]), aclosing(open_[1]), aclosing(open_[2]):
            await anext(open_[0])
            await anext(open_[1])
            with pytest.raises(ResourceExhausted):
                await anext(open_[2])
            await open_[0].aclose()
            again = streams.watch("q", "", NONE)
            async with aclosing(again):
                await anext(again)
                waiting = asyncio.create_task(anext(again))
                await asyncio.sleep(0)
                streams.drain()
                with pytest.raises(Unavailable):
                    await waiting
                with pytest.raises(Unavailable):
                    await anext(open_[1])
