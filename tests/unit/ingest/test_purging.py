"""Removing messages of a shard that is opened without a server, by a clock that tests move."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import pytest

from libs.storage.database.roots import Root, open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch, Database
from libs.storage.errors import StoreUnavailable
from libs.storage.layout.keys import log_key, payload_key
from libs.storage.records.metadata import decode_log_entry
from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge, Purged
from services.ingest.edit.replacing import Replacement
from services.ingest.read import entries
from services.ingest.read.entries import entries_of, entry_before
from services.ingest.shard import Shard
from slatemq.errors import FailedPrecondition, NotFound
from slatemq.v1.ingest_pb2 import PublishRun
from tests.forms import seeds
from tests.manual_clock import ManualClock
from tests.stored_messages import read_messages
from tests.unit.ingest import shards
from tests.unit.ingest.shards import accepted, batch, sequences

GRACE_MS = 60_000
HOUR_MS = 3_600_000
WINDOW_MS = 7 * 24 * HOUR_MS


def opened(
    root: Root | None = None, clock: ManualClock | None = None, **settings: Any
) -> AbstractAsyncContextManager[Shard]:
    return shards.opened(root, clock, **{"heartbeat_ms": 20, **settings})


LONG_S = 365 * 24 * 3600


def lasting(payload: bytes, retention_s: int) -> PublishRun:
    return PublishRun(payloads=[payload], retention_s=retention_s)


async def purge(
    shard: Shard, ids: Iterable[int], reason: Reason = Reason.EXPIRED, epoch: int = 0
) -> Purged:
    return await shard.purger.purge(Purge(epoch, reason, list(ids)))


async def stored(shard: Shard, ids: Iterable[int]) -> list[int]:
    return [message.message_id for message in (await read_messages(shard, *ids)).messages]


async def logged(shard: Shard, after: int = 0) -> list[int]:
    """The IDs in the log, as a tailer gets them."""
    found = []
    for sequence in await sequences_left(shard, after):
        result = await entry_before(shard.database, sequence)
        assert result is not None
        found += [one.message_id for one in decode_log_entry(result[1])]
    return found


async def sequences_left(shard: Shard, after: int = 0) -> list[int]:
    """The sequences that a tailer gets until it has got all."""
    found: list[int] = []
    async with aclosing(shard.log.tail(after)) as updates:
        async for update in updates:
            found += [sequence for sequence, _ in update.entries]
            if not update.entries:
                return found
    raise AssertionError("a tail has no end")


async def test_a_message_goes_when_its_retention_is_over_by_the_grace_period() -> None:
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        published = await shard.publisher.publish(
            accepted(lasting(b"an hour", 3600), lasting(b"two", 7200), lasting(b"for ever", 0))
        )
        ids = [published.first_message_id + n for n in range(3)]
        clock.advance(HOUR_MS + GRACE_MS - 1)
        assert await purge(shard, ids) == Purged(0, 0, ids)
        clock.advance(1)
        assert await purge(shard, ids) == Purged(1, 7, ids[1:])
        assert await stored(shard, ids) == await logged(shard) == ids[1:]
        assert await purge(shard, ids) == Purged(0, 0, ids[1:])
        clock.advance(100 * WINDOW_MS)
        assert await purge(shard, ids) == Purged(1, 3, ids[2:])


async def test_what_no_queue_needs_goes_when_it_is_older_than_the_replay_window_and_the_grace() -> (
    None
):
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        first = (
            await shard.publisher.publish(accepted(lasting(b"a", LONG_S), lasting(b"b", LONG_S)))
        ).first_message_id
        clock.advance(WINDOW_MS + GRACE_MS - 1)
        assert await purge(shard, [first], Reason.UNREFERENCED) == Purged(0, 0, [first])
        clock.advance(1)
        assert await purge(shard, [first], Reason.UNREFERENCED) == Purged(1, 1)
        assert await logged(shard) == [first + 1]


async def test_what_is_to_be_kept_for_ever_stays_though_no_queue_needs_it() -> None:
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        published = await shard.publisher.publish(
            accepted(lasting(b"for ever", 0), lasting(b"long", LONG_S))
        )
        ids = [published.first_message_id, published.first_message_id + 1]
        clock.advance(WINDOW_MS + GRACE_MS)
        assert await purge(shard, ids, Reason.UNREFERENCED) == Purged(1, 4, ids[:1])
        assert await stored(shard, ids) == await logged(shard) == ids[:1]


async def test_with_a_replay_window_without_end_nothing_is_ever_unneeded() -> None:
    clock = ManualClock()
    async with opened(clock=clock, replay_window_s=0) as shard:
        first = (await shard.publisher.publish(batch(b"a"))).first_message_id
        clock.advance(1000 * WINDOW_MS)
        assert await purge(shard, [first], Reason.UNREFERENCED) == Purged(0, 0, [first])
        assert await purge(shard, [first]) == Purged(1, 1)


async def test_what_is_not_stored_yet_is_refused_and_what_never_was_is_gone() -> None:
    clock = ManualClock()
    root = open_root("memory:///")
    async with opened(root, clock, id_block_size=100) as shard:
        await shard.publisher.publish(batch(b"a"))
    async with opened(root, clock, id_block_size=100) as shard:
        second = (await shard.publisher.publish(batch(b"b"))).first_message_id
        assert second > 50
        clock.advance(10 * HOUR_MS)
        assert await purge(shard, [50, second + 1]) == Purged(0, 0, [second + 1])


async def test_a_decision_from_before_the_epoch_was_raised_is_refused() -> None:
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        first = (await shard.publisher.publish(batch(b"a"))).first_message_id
        clock.advance(10 * HOUR_MS)
        assert await shard.purge_epoch.raise_by_one() == 1
        for epoch in (0, 2):
            with pytest.raises(FailedPrecondition) as refused:
                await purge(shard, [first], epoch=epoch)
            assert refused.value.reason == "STALE_PURGE_EPOCH"
            assert refused.value.metadata["purge_epoch"] == "1"
        assert await stored(shard, [first]) == [first]
        assert (await purge(shard, [first], epoch=1)).count == 1


async def test_an_epoch_that_is_raised_between_two_pieces_stops_the_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.ingest.edit.purging.PIECE_ENTRIES", 2)
    clock = ManualClock()
    async with opened(clock=clock) as shard:
        ids = [(await shard.publisher.publish(batch(b"%d" % n))).first_message_id for n in range(6)]
        clock.advance(10 * HOUR_MS)
        purging = asyncio.create_task(purge(shard, ids))
        async with asyncio.timeout(60):
            while len(await stored(shard, ids)) == len(ids):
                await asyncio.sleep(0)
            await shard.purge_epoch.raise_by_one()
        with pytest.raises(FailedPrecondition):
            await purging
        left = await stored(shard, ids)
        assert left == await logged(shard) == ids[-len(left) :]
        assert 0 < len(left) < len(ids)


async def test_the_end_of_the_log_stays_where_it_was_also_after_a_restart() -> None:
    clock = ManualClock()
    root = open_root("memory:///")
    async with opened(root, clock) as shard:
        await shard.publisher.publish(batch(b"a"))
        last = (await shard.publisher.publish(batch(b"b", b"c"))).first_message_id
        end = shard.log.end
        assert end == (last, last + 1)
        clock.advance(10 * HOUR_MS)
        await purge(shard, [last + 1])
        assert shard.log.end == end
    async with opened(root, clock) as shard:
        assert shard.log.end == end
        await purge(shard, range(1, last + 1))
        assert await sequences_left(shard) == await sequences_left(shard, end.sequence) == []
        assert shard.log.end == end
        assert await shard.log.position_before(clock.now_ms()) == 0
    async with opened(root, clock) as shard:
        assert shard.log.end == end
        assert await sequences_left(shard, last) == []
        following = (await shard.publisher.publish(batch(b"d"))).first_message_id
        assert following > end.last_message_id
        assert await sequences(shard, last) == [following]
    async with opened(root, clock) as shard:
        assert shard.log.end == (following, following)


async def test_what_was_removed_at_the_beginning_is_not_passed_again_also_after_a_restart() -> None:
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as shard:
        ids = [(await shard.publisher.publish(batch(b"%d" % n))).first_message_id for n in range(9)]
        clock.advance(10 * HOUR_MS)
        await purge(shard, ids[1:3])
        assert shard.log.bounds.first_sequence == ids[0]
        await purge(shard, ids[:5])
        assert shard.log.bounds.first_sequence == ids[5]
        await purge(shard, ids[7:8])
        assert shard.log.bounds.first_sequence == ids[5]
    async with opened(root, clock) as shard:
        assert shard.log.bounds.first_sequence == ids[5]
        assert await sequences_left(shard) == [ids[5], ids[6], ids[8]]
        assert await shard.log.position_before(clock.now_ms()) == ids[8]


@pytest.mark.parametrize("seed", seeds(12, 2))
async def test_random_purges_remove_what_they_may_and_nothing_else(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    monkeypatch.setattr("services.ingest.edit.purging.PIECE_ENTRIES", chance.choice((1, 3, 512)))
    monkeypatch.setattr(entries, "ROWS_MAX", chance.choice((1, 8, 64)))
    monkeypatch.setattr(entries, "NEAR", chance.choice((0, 3, 64)))
    monkeypatch.setattr(entries, "INLINE_BYTES_MAX", chance.choice((0, 1 << 20)))
    clock, root = ManualClock(), open_root("memory:///")
    # Given messages, some to be gone after an hour, some after a day
    model: dict[int, bool] = {}
    every: list[int] = []
    cached = chance.choice((0, 10_000, 64 << 20))
    for _ in range(3):
        async with opened(root, clock, log_cache_bytes=cached, id_block_size=50) as shard:
            for _ in range(chance.randrange(1, 15)):
                short = [chance.random() < 0.6 for _ in range(chance.randrange(1, 12))]
                messages = [lasting(b"x" * 10, 3600 if one else 86_400) for one in short]
                first = (await shard.publisher.publish(accepted(*messages))).first_message_id
                model |= {first + n: one for n, one in enumerate(short)}
            every = sorted(model.keys() | set(every))
            clock.advance(2 * HOUR_MS)
            # When some of them are purged, and some that are gone already
            for _ in range(chance.randrange(1, 4)):
                some = [one for one in every if chance.random() < chance.choice((0.1, 0.6))]
                chance.shuffle(some)
                result = await purge(shard, some)
                may = {one for one in some if model.get(one)}
                assert result.count == len(may)
                assert result.size_bytes == 10 * len(may)
                assert result.refused_ids == sorted(
                    one for one in some if one in model and one not in may
                )
                for one in may:
                    del model[one]
            # Then the others are left, whoever looks
            assert await stored(shard, every) == await logged(shard) == sorted(model)
            for one in chance.sample(every, min(10, len(every))):
                received_at_ms = await shard.log.received_at_ms(one)
                assert received_at_ms > 0 or one not in model
            found = [found.sequence async for found in entries_of(shard.database, every, lambda: 0)]
            assert found == await sequences_left(shard)


async def test_a_blob_goes_after_the_commit_and_one_that_cannot_be_deleted_stays_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as shard:
        large = (await shard.publisher.publish(batch(bytes(70_000), b"s"))).first_message_id
        another = (await shard.publisher.publish(batch(bytes(80_000)))).first_message_id
        assert len(await root.objects.list("blobs")) == 2
        clock.advance(10 * HOUR_MS)
        assert await purge(shard, [large, large + 1]) == Purged(2, 70_001)
        assert len(await root.objects.list("blobs")) == 1

        async def away(path: str) -> None:
            raise StoreUnavailable("down")

        monkeypatch.setattr(root.objects, "delete", away)
        assert await purge(shard, [another]) == Purged(1, 80_000)
        assert len(await root.objects.list("blobs")) == 1
        assert await stored(shard, [large, another]) == []


async def test_a_blob_is_not_deleted_when_the_commit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as shard:
        large = (await shard.publisher.publish(batch(bytes(70_000)))).first_message_id
        clock.advance(10 * HOUR_MS)

        async def flush(self: Database) -> None:
            raise StoreUnavailable("down")

        monkeypatch.setattr(Database, "flush", flush)
        with pytest.raises(StoreUnavailable):
            await purge(shard, [large])
        assert len(await root.objects.list("blobs")) == 1
        async with asyncio.timeout(60):
            with pytest.raises(StoreUnavailable):
                await read_messages(shard, large)


async def test_edits_and_purges_of_one_entry_take_turns() -> None:
    clock = ManualClock()
    async with opened(clock=clock, commit_interval_ms="20") as shard:
        first = await shard.publisher.publish(batch(*[b"%d" % n for n in range(30)]))
        ids = [first.first_message_id + n for n in range(30)]
        clock.advance(10 * HOUR_MS)
        edits = [
            shard.replacer.replace(Replacement(one, "", b"new", {"n": str(one)})) for one in ids
        ]
        results = await asyncio.gather(
            *edits,
            *(purge(shard, ids[n : n + 5]) for n in range(0, 20, 5)),
            return_exceptions=True,
        )
        refused = [one for one in results if isinstance(one, BaseException)]
        assert all(isinstance(one, NotFound) for one in refused)
        messages = (await read_messages(shard, *ids)).messages
        assert [message.message_id for message in messages] == ids[20:]
        assert [dict(message.headers) for message in messages] == [{"n": str(n)} for n in ids[20:]]
        assert {message.payload for message in messages} == {b"new"}


async def test_who_gives_up_waiting_does_not_stop_a_purge_halfway() -> None:
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock, commit_interval_ms="200") as shard:
        first = (await shard.publisher.publish(batch(bytes(70_000)))).first_message_id
        clock.advance(10 * HOUR_MS)
        purging = asyncio.create_task(purge(shard, [first]))
        async with asyncio.timeout(60):
            while not shard.publisher._records:
                await asyncio.sleep(0)
            purging.cancel()
            while await root.objects.list("blobs"):
                await asyncio.sleep(0.01)
        assert await stored(shard, [first]) == []


async def damage(root: Root, key: bytes, value: bytes) -> None:
    database = await root.database("ingest/0", Kind.INGEST)
    rows = Batch()
    rows.put(key, value)
    await database.commit(rows)
    await database.close()


async def test_a_damaged_entry_stays_and_its_messages_are_refused() -> None:
    clock, root = ManualClock(), open_root("memory:///")
    async with opened(root, clock) as shard:
        first = (await shard.publisher.publish(batch(b"a", b"b"))).first_message_id
        second = (await shard.publisher.publish(batch(b"c"))).first_message_id
    await damage(root, log_key(first), b"\x02\x00damaged")
    await damage(root, payload_key(second), b"damaged")
    clock.advance(10 * HOUR_MS)
    async with opened(root, clock) as shard:
        result = await purge(shard, [first, first + 1, second])
        assert result == Purged(1, 1, [first, first + 1])
        assert await shard.database.get(log_key(first)) is not None
        assert await shard.database.get(log_key(second)) is None


async def test_what_a_purge_rewrites_itself_makes_it_read_no_other_entry_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.ingest.edit.purging.PIECE_ENTRIES", 2)
    looked_up: list[bytes] = []
    get_many = Database.get_many

    async def noted(self: Database, keys: Iterable[bytes], durable: bool) -> list[bytes | None]:
        looked_up.extend(some := list(keys))
        return await get_many(self, some, durable)

    clock = ManualClock()
    async with opened(clock=clock) as shard:
        ids = []
        for _ in range(9):
            first = (await shard.publisher.publish(batch(b"a", b"b"))).first_message_id
            ids += [first, first + 1]
        clock.advance(10 * HOUR_MS)
        monkeypatch.setattr(Database, "get_many", noted)
        assert (await purge(shard, ids[::2])).count == 9
        assert not [key for key in looked_up if key.startswith(log_key(0)[:-8])]
        monkeypatch.setattr(Database, "get_many", get_many)
        assert await stored(shard, ids) == await logged(shard) == ids[1::2]
