"""Pushes that wait together, wait long, or are refused on the way."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.database.blobs import Blobs
from libs.storage.database.roots import Root
from services.ingest.shard import Shard
from services.ingest.write.pushing import Push
from slatemq.errors import FailedPrecondition, ResourceExhausted, Unavailable
from tests.manual_clock import ManualClock
from tests.stored_messages import read_messages
from tests.unit.ingest.shards import GatedObjects, batch, opened

LARGE = bytes(65_536)
HOUR_MS = 60 * 60 * 1000


async def push(shard: Shard, first: int, *payloads: bytes) -> int:
    return await shard.publisher.push(Push(0, first), batch(*payloads), {})


async def payloads(shard: Shard) -> list[bytes]:
    last = shard.log.end.last_message_id
    read = await read_messages(shard, *range(last & ~0xFFFF | 1, last + 1))
    return [message.payload for message in read.messages]


async def test_rows_that_overtake_others_are_behind_a_gap(root: Root, store: GatedObjects) -> None:
    async with opened(root) as shard:
        slow = asyncio.create_task(push(shard, 1, LARGE))
        async with asyncio.timeout(60):
            while not store.writes:
                await asyncio.sleep(0)
        with pytest.raises(FailedPrecondition):
            await push(shard, 2, b"2")
        # Another sender has row 1 too, in hand: it is stored, and the upload was for nothing.
        assert await push(shard, 1, b"1", b"2") == 2
        store.gate.set()
        assert await slow == 2
        assert await payloads(shard) == [b"1", b"2"]


async def test_a_row_that_was_refused_is_not_passed(root: Root, store: GatedObjects) -> None:
    clock = ManualClock()
    async with opened(root, clock) as shard:
        assert await push(shard, 1, b"1") == 1
        late = asyncio.create_task(push(shard, 2, LARGE, b"3"))
        async with asyncio.timeout(60):
            while not store.writes:
                await asyncio.sleep(0)
        clock.advance(HOUR_MS + 1)
        store.gate.set()
        with pytest.raises(Unavailable):
            await late
        with pytest.raises(FailedPrecondition) as refused:
            await push(shard, 4, b"4")
        assert refused.value.metadata["last_number"] == "1"
        assert await push(shard, 2, LARGE, b"3") == 3
        assert await payloads(shard) == [b"1", LARGE, b"3"]


async def test_pushes_are_bounded_like_publishes(root: Root, store: GatedObjects) -> None:
    async with opened(root, uncommitted_bytes_max=len(LARGE)) as shard:
        first = asyncio.create_task(push(shard, 1, LARGE))
        async with asyncio.timeout(60):
            while not store.writes:
                await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted):
            await push(shard, 1, b"1")
        store.gate.set()
        assert await first == 1


async def test_pushes_and_publishes_of_one_commit_have_ids_of_their_own(root: Root) -> None:
    async with opened(root) as shard:
        answers = await asyncio.gather(
            push(shard, 1, b"1", b"2"),
            shard.publisher.publish(batch(b"published")),
            push(shard, 1, b"1"),
            push(shard, 2, b"2", b"3"),
        )
        assert [answer for answer in answers if isinstance(answer, int)] == [2, 2, 3]
        assert sorted(await payloads(shard)) == [b"1", b"2", b"3", b"published"]


@pytest.mark.parametrize(("age_ms", "objects_count"), [(HOUR_MS - 60_000, 1), (HOUR_MS, 2)])
async def test_a_payload_that_an_outbox_stored_long_ago_is_copied_before_it_is_referred_to(
    root: Root, age_ms: int, objects_count: int
) -> None:
    blobs = Blobs(root)
    uri = await blobs.put(LARGE)
    clock = ManualClock(await blobs.stored_ms(uri) + age_ms + 1)
    async with opened(root, clock) as shard:
        row = batch(b"")
        row.columns.payload_bytes[0], row.elsewhere = len(LARGE), [0]
        assert await shard.publisher.push(Push(0, 1), row, {0: uri}) == 1
        assert len(await root.objects.list("blobs")) == objects_count
        if objects_count > 1:
            await blobs.delete(uri)  # as a job may that has not seen that it is referred to
        assert await payloads(shard) == [LARGE]
        # A row that is sent again copies nothing.
        assert await shard.publisher.push(Push(0, 1), row, {0: uri}) == 1
        assert len(await root.objects.list("blobs")) == 1


async def test_a_payload_that_grew_too_old_on_the_way_is_not_committed(root: Root) -> None:
    blobs = Blobs(root)
    uri = await blobs.put(LARGE)
    clock = ManualClock(await blobs.stored_ms(uri) + HOUR_MS - 10)
    async with opened(root, clock, commit_interval_ms="200") as shard:
        assert await push(shard, 1, b"1") == 1
        row = batch(b"")
        row.columns.payload_bytes[0], row.elsewhere = len(LARGE), [0]
        pushing = asyncio.create_task(shard.publisher.push(Push(0, 2), row, {0: uri}))
        async with asyncio.timeout(60):
            while not shard.publisher._waiting:
                await asyncio.sleep(0)
        clock.advance(HOUR_MS)
        with pytest.raises(Unavailable):
            await pushing
        assert await shard.publisher.push(Push(0, 2), row, {0: uri}) == 2
        assert await payloads(shard) == [b"1", LARGE]
