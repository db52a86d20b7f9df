"""Replacing messages, where the commit loop is slow."""

from __future__ import annotations

import asyncio

import pytest

from libs.storage.errors import StoreUnavailable
from libs.storage.slate import Batch, Database
from services.ingest.reading import Room
from services.ingest.replacing import Replacement
from slatemq.errors import ResourceExhausted
from tests.unit.ingest.shards import batch, opened


async def test_the_next_one_waits_for_a_replace_whose_caller_has_gone() -> None:
    async with opened(commit_interval_ms=500) as shard:
        first = (await shard.publisher.publish(batch(b"1", b"2"))).first_message_id
        second = first + 1
        giving_up = asyncio.create_task(
            shard.replacer.replace(Replacement(first, "", b"one", {"a": "1"}))
        )
        async with asyncio.timeout(60):
            while not shard.publisher._records:
                await asyncio.sleep(0)
        giving_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await giving_up

        await shard.replacer.replace(Replacement(second, "", b"two", {"a": "2"}))

        read = await shard.reader.read([first, second], Room(1 << 20, 1 << 20))
        assert [payload for _, payload in read.messages] == [b"one", b"two"]
        assert [dict(told.headers) for told, _ in read.messages] == [{"a": "1"}, {"a": "2"}]
        stored = await shard.log.stored(second)
        assert stored is not None
        assert [one.payload_bytes for one in stored[1]] == [3, 3]


async def test_a_message_that_is_read_while_it_is_replaced_is_read_when_it_is_durable() -> None:
    async with opened(commit_interval_ms=500) as shard:
        first = (await shard.publisher.publish(batch(b"1", b"2"))).first_message_id
        replacing = asyncio.create_task(
            shard.replacer.replace(Replacement(first, "", b"one", None))
        )
        async with asyncio.timeout(60):
            while not shard.publisher._records:
                await asyncio.sleep(0)
        read = await shard.reader.read([first], Room(1 << 20, 1 << 20), with_etags=True)
        assert [payload for _, payload in read.messages] == [b"one"]
        assert read.etags == [await replacing]


async def test_whoever_reads_a_message_whose_replace_failed_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as shard:
        first = (await shard.publisher.publish(batch(b"1"))).first_message_id

        async def write(self: Database, batch: Batch) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(Database, "write", write)
        with pytest.raises(StoreUnavailable):
            await shard.replacer.replace(Replacement(first, "", b"one", None))
        async with asyncio.timeout(60):
            with pytest.raises(StoreUnavailable):
                await shard.reader.read([first], Room(1 << 20, 1 << 20))


async def test_replaces_are_bounded_like_publishes() -> None:
    async with opened(uncommitted_bytes_max=100_000, commit_interval_ms=500) as shard:
        first = (await shard.publisher.publish(batch(b"1"))).first_message_id
        second = (await shard.publisher.publish(batch(b"2"))).first_message_id
        answers = await asyncio.gather(
            *(
                shard.replacer.replace(Replacement(one, "", bytes(60_000), None))
                for one in (first, second)
            ),
            return_exceptions=True,
        )
        assert sum(isinstance(answer, ResourceExhausted) for answer in answers) == 1
        await shard.replacer.replace(Replacement(first, "", bytes(60_000), None))
