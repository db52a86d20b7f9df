"""Replacing messages, where the commit loop is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing
from typing import Final

import pytest

from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.keys import log_key
from libs.storage.records.metadata import decode_log_entry
from services.ingest.edit.replacing import Replacement
from services.ingest.read.entries import entry_before
from services.ingest.shard import Shard
from slatemq._secrets import KEY_HEADER
from slatemq.errors import InvalidArgument, ResourceExhausted
from tests.stored_messages import read_messages
from tests.unit.ingest.shards import batch, opened

KEYED: Final = {"a": "1", KEY_HEADER: "k1"}


async def test_the_next_one_waits_for_a_replace_whose_caller_has_gone() -> None:
    async with opened(commit_interval_ms="500") as shard:
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

        messages = (await read_messages(shard, first, second)).messages
        assert [message.payload for message in messages] == [b"one", b"two"]
        assert [dict(message.headers) for message in messages] == [{"a": "1"}, {"a": "2"}]
        stored = await entry_before(shard.database, second)
        assert stored is not None
        assert [one.payload_bytes for one in decode_log_entry(stored[1])] == [3, 3]


async def test_a_message_that_is_read_while_it_is_replaced_is_read_when_it_is_durable() -> None:
    async with opened(commit_interval_ms="500") as shard:
        first = (await shard.publisher.publish(batch(b"1", b"2"))).first_message_id
        replacing = asyncio.create_task(
            shard.replacer.replace(Replacement(first, "", b"one", None))
        )
        async with asyncio.timeout(60):
            while not shard.publisher._records:
                await asyncio.sleep(0)
        read = await read_messages(shard, first, with_etags=True)
        assert [message.payload for message in read.messages] == [b"one"]
        assert read.etags == [await replacing]


async def test_readers_of_a_message_whose_replace_failed_get_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as shard:
        first = (await shard.publisher.publish(batch(b"1"))).first_message_id

        async def write(self: Database, batch: Batch, alone: bool = False) -> bool:
            raise StoreUnavailable("down")

        monkeypatch.setattr(Database, "write", write)
        with pytest.raises(StoreUnavailable):
            await shard.replacer.replace(Replacement(first, "", b"one", None))
        async with asyncio.timeout(60):
            with pytest.raises(StoreUnavailable):
                await read_messages(shard, first)


async def test_new_headers_leave_the_key_of_an_encrypted_payload_as_it_is() -> None:
    # Given a message of which the payload is encrypted, and one of which it is not
    async with opened() as shard:
        secret = (await shard.publisher.publish(batch(b"%!", **KEYED))).first_message_id
        plain = (await shard.publisher.publish(batch(b"1"))).first_message_id
        before = (await read_messages(shard, secret, with_etags=True)).etags[0]

        # When headers that do not know of the key, or name another one, take the place of others
        edit = Replacement(secret, before, None, {"a": "2"})
        etag = await shard.replacer.replace(edit)
        await shard.replacer.replace(Replacement(plain, "", None, {"a": "2", KEY_HEADER: "k2"}))

        # Then the key stays with the payload, and a repeat is answered like the first call
        assert await headers_of(shard, secret, plain) == [{"a": "2", KEY_HEADER: "k1"}, {"a": "2"}]
        assert await shard.replacer.replace(edit) == etag
        await shard.replacer.replace(
            Replacement(secret, etag, None, {"a": "3", KEY_HEADER: "other"})
        )
        assert (await headers_of(shard, secret))[0] == {"a": "3", KEY_HEADER: "k1"}


async def test_a_payload_does_not_get_the_key_of_the_one_before() -> None:
    async with opened() as shard:
        first = (await shard.publisher.publish(batch(b"%!", **KEYED))).first_message_id

        with pytest.raises(InvalidArgument) as refused:
            await shard.replacer.replace(Replacement(first, "", b"plain", None))

        assert refused.value.field == "headers"
        assert await headers_of(shard, first) == [KEYED]
        await shard.replacer.replace(Replacement(first, "", b"!%", {KEY_HEADER: "k2"}))
        assert await headers_of(shard, first) == [{KEY_HEADER: "k2"}]
        await shard.replacer.replace(Replacement(first, "", b"plain", {"a": "1"}))
        assert await headers_of(shard, first) == [{"a": "1"}]
        await shard.replacer.replace(Replacement(first, "", b"plainer", None))


async def headers_of(shard: Shard, *message_ids: int) -> list[dict[str, str]]:
    read = await read_messages(shard, *message_ids)
    return [dict(message.headers) for message in read.messages]


async def test_replaces_are_bounded_like_publishes() -> None:
    async with opened(uncommitted_bytes_max=100_000, commit_interval_ms="500") as shard:
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


async def test_what_a_tail_reads_of_a_rewritten_entry_waits_until_it_is_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given tails that read the database, and a disk that takes its time
    async with opened(log_cache_bytes=0) as shard:
        first = (await shard.publisher.publish(batch(b"1", b"2"))).first_message_id
        await shard.publisher.publish(batch(b"3"))
        synced = asyncio.Event()

        async def sync() -> None:
            await synced.wait()

        monkeypatch.setattr(shard.database._durability, "sync", sync)
        replacing = asyncio.create_task(
            shard.replacer.replace(Replacement(first, "", None, {"a": "1"}))
        )
        async with asyncio.timeout(60):
            while await headers_shown(shard, first) != {"a": "1"}:
                await asyncio.sleep(0)

        # When the entry is in the store, and not synced
        async with aclosing(shard.log.tail(0)) as tail:
            reading = asyncio.create_task(anext(tail))
            done, _ = await asyncio.wait([reading, replacing], timeout=0.1)
            if done:
                synced.set()  # no one is to wait for a test that fails
            assert not done
            # Then whoever reads elsewhere does not wait, and the others get it when it is
            async with aclosing(shard.log.tail(first + 1)) as behind:
                assert [sequence for sequence, _ in (await anext(behind)).entries] == [first + 2]
            synced.set()
            value = await reading
            assert decode_log_entry(value.entries[0][1])[0].headers == {"a": "1"}
        await replacing


async def headers_shown(shard: Shard, first: int) -> Mapping[str, str]:
    """What SlateDB gives as durable, which on a disk it may not be."""
    value = await shard.database.get(log_key(first), durable=True)
    assert value is not None
    return decode_log_entry(value)[0].headers


@pytest.mark.parametrize("fails", [False, True])
async def test_readers_learn_how_a_replace_ended_also_when_the_one_who_waited_for_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    async with opened(commit_interval_ms="300") as shard:
        first = (await shard.publisher.publish(batch(b"1"))).first_message_id
        if fails:

            async def flush(self: Database) -> None:
                raise StoreUnavailable("down")

            monkeypatch.setattr(Database, "flush", flush)
        replacing = asyncio.create_task(
            shard.replacer.replace(Replacement(first, "", b"one", None))
        )
        async with asyncio.timeout(60):
            while not shard.publisher._records:
                await asyncio.sleep(0)
            reading = asyncio.create_task(read_messages(shard, first))
            for task in list(shard.replacer._turns._running):
                task.cancel()
            await asyncio.wait([replacing])
            if fails:
                with pytest.raises(StoreUnavailable):
                    await reading
            else:
                assert [message.payload for message in (await reading).messages] == [b"one"]
