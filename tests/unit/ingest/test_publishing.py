import asyncio
from typing import Any

import pytest

from libs.storage.database.roots import Root
from libs.storage.errors import StoreFailed
from libs.storage.layout import ids
from libs.storage.layout.own_keys import dedupe_ends_key, dedupe_key
from services.ingest.batches import Accepted
from services.ingest.shard import Shard
from services.ingest.write.publishing import STEP_PUBLISHES
from services.ingest.write.waiting import Waiting
from slatemq.errors import InvalidArgument, ResourceExhausted, Unavailable
from slatemq.v1.ingest_pb2 import PublishRun
from tests.manual_clock import ManualClock
from tests.stored_messages import read_messages
from tests.unit.ingest.shards import GatedObjects, accepted, batch, opened, sequences
from tests.unit.storage.database.commit_loop import HeldSync

LARGE = bytes(65_536)
HOUR_MS = 60 * 60 * 1000


async def until_uploading(store: GatedObjects, count: int = 1) -> None:
    async with asyncio.timeout(60):
        while store.writes < count:
            await asyncio.sleep(0)


async def test_a_slow_blob_never_lets_the_log_go_out_of_order(
    root: Root, store: GatedObjects
) -> None:
    async with opened(root) as shard:
        # Given a publish whose blob takes long
        slow = asyncio.create_task(shard.publisher.publish(batch(b"a", LARGE)))
        await until_uploading(store)

        # When a fast one begins later and is answered first
        fast = await shard.publisher.publish(batch(b"b"))
        assert await sequences(shard) == [fast.first_message_id]
        store.gate.set()
        slow_answer = await slow

        # Then the slow one comes after it, in IDs and in the log
        assert slow_answer.first_message_id > fast.first_message_id
        assert await sequences(shard) == [fast.first_message_id, slow_answer.first_message_id]
        # A tailer that had seen the fast one misses nothing
        assert await sequences(shard, fast.first_message_id) == [slow_answer.first_message_id]


async def test_a_shard_without_ids_does_not_say_that_waiting_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with opened() as shard:
        monkeypatch.setattr(ids, "MAX_SEQUENCE", 0)

        with pytest.raises(ResourceExhausted) as caught:
            await shard.publisher.publish(batch(b"a"))

        assert (caught.value.reason, caught.value.retry_after_ms) == ("SHARD_FULL", None)


async def test_the_time_of_receipt_is_that_of_the_commit(root: Root, store: GatedObjects) -> None:
    clock = ManualClock()
    async with opened(root, clock) as shard:
        slow = asyncio.create_task(shard.publisher.publish(batch(LARGE)))
        await until_uploading(store)
        clock.advance(500)
        fast = await shard.publisher.publish(batch(b"b"))
        clock.advance(500)
        store.gate.set()
        answers = [fast, await slow]

        read = await read_messages(shard, *(one.first_message_id for one in answers))
        times = [message.received_at_ms - clock.now_ms() for message in read.messages]
        assert times == [-500, 0]


@pytest.mark.parametrize(("late_ms", "stored"), [(HOUR_MS, True), (HOUR_MS + 1, False)])
async def test_a_blob_older_than_an_hour_is_not_committed(
    root: Root, store: GatedObjects, late_ms: int, stored: bool
) -> None:
    clock = ManualClock()
    async with opened(root, clock) as shard:
        slow = asyncio.create_task(shard.publisher.publish(batch(LARGE, request_id="r")))
        await until_uploading(store)
        clock.advance(late_ms)
        store.gate.set()
        if stored:
            assert (await slow).message_count == 1
            return
        with pytest.raises(Unavailable):
            await slow
        assert await sequences(shard) == []
        # And the retry, with the same request ID, is a first one
        assert (await shard.publisher.publish(batch(LARGE, request_id="r"))).message_count == 1


async def test_a_repeat_waits_for_the_first_that_is_on_its_way(
    root: Root, store: GatedObjects
) -> None:
    async with opened(root) as shard:
        first = asyncio.create_task(shard.publisher.publish(batch(LARGE, request_id="r")))
        await until_uploading(store)
        repeat = asyncio.create_task(shard.publisher.publish(batch(LARGE, request_id="r")))
        other = asyncio.create_task(shard.publisher.publish(batch(b"x", request_id="r")))
        await shard.publisher.publish(batch(b"y"))
        assert not repeat.done()
        assert not other.done()

        store.gate.set()
        assert await repeat == await first
        with pytest.raises(InvalidArgument):
            await other
        assert store.writes == 1


async def test_a_repeat_takes_over_when_the_first_is_given_up(
    root: Root, store: GatedObjects
) -> None:
    async with opened(root) as shard:
        first = asyncio.create_task(shard.publisher.publish(batch(LARGE, request_id="r")))
        await until_uploading(store)
        repeat = asyncio.create_task(shard.publisher.publish(batch(LARGE, request_id="r")))
        await asyncio.sleep(0)
        first.cancel()
        await until_uploading(store, 2)
        store.gate.set()
        answered = await repeat
        assert await sequences(shard) == [answered.first_message_id]


async def test_a_duplicate_is_not_uploaded(root: Root, store: GatedObjects) -> None:
    store.gate.set()
    async with opened(root) as shard:
        (first,) = (await shard.publisher.publish(large("k"))).message_ids
        (again,) = (await shard.publisher.publish(large("k"))).message_ids
        assert (again, store.writes) == (first, 1)


async def test_of_two_on_their_way_with_one_key_the_first_to_be_committed_has_it(
    root: Root, store: GatedObjects
) -> None:
    async with opened(root) as shard:
        slow = asyncio.create_task(shard.publisher.publish(large("k")))
        await until_uploading(store)
        quick = await shard.publisher.publish(accepted(keyed("k")))
        assert not quick.duplicates
        store.gate.set()
        assert list((await slow).message_ids) == list(quick.message_ids)
        assert (await slow).duplicates
        assert await sequences(shard) == list(quick.message_ids)


@pytest.mark.parametrize("request_id", ["", "r"])
@pytest.mark.parametrize("fails", [False, True])
async def test_a_duplicate_gets_no_answer_before_the_first_message_is_durable(
    root: Root, fails: bool, request_id: str
) -> None:
    disk = HeldSync()
    disk.open.set()
    root.durability = disk
    async with opened(root) as shard:
        # Given a message whose commit the disk holds back, and a duplicate that was drained
        disk.open.clear()
        try:
            first = asyncio.create_task(shard.publisher.publish(accepted(keyed("k"))))
            await disk.until_waiting()
            waiting = Waiting(accepted(keyed("k"), request_id=request_id))
            duplicate = asyncio.create_task(shard.publisher.publish_waiting(waiting))
            async with asyncio.timeout(60):
                while not (waiting.was_drained or duplicate.done()):
                    await asyncio.sleep(0)
            for _ in range(300):
                await asyncio.sleep(0)
            is_answered = duplicate.done()

            # When the disk goes on, or fails
            disk.error = OSError(5, "Input/output error") if fails else None
        finally:
            disk.open.set()
        both = await asyncio.gather(first, duplicate, return_exceptions=True)

        # Then both have the same message, or an error
        assert not is_answered
        if fails:
            assert [type(error) for error in both] == [StoreFailed, StoreFailed]
            return
        assert list((await duplicate).message_ids) == list((await first).message_ids)
        assert (await duplicate).duplicates
        assert await sequences(shard) == list((await first).message_ids)


async def test_a_publish_that_is_given_up_leaves_its_key_free(
    root: Root, store: GatedObjects
) -> None:
    clock = ManualClock()
    async with opened(root, clock) as shard:
        # Given one that is cancelled, and one whose upload took too long
        cancelled = asyncio.create_task(shard.publisher.publish(large("k", request_id="r")))
        await until_uploading(store)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        late = asyncio.create_task(shard.publisher.publish(large("k", request_id="r")))
        await until_uploading(store, 2)
        clock.advance(HOUR_MS + 1)
        store.gate.set()
        with pytest.raises(Unavailable):
            await late

        # Then the next one is the first
        answered = await shard.publisher.publish(large("k", request_id="r"))
        assert not answered.duplicates
        assert await sequences(shard) == list(answered.message_ids)


async def test_keys_that_have_ended_are_removed_in_the_background(root: Root) -> None:
    clock = ManualClock()
    async with opened(root, clock, dedupe_window_s=60) as shard:
        first = await shard.publisher.publish(accepted(keyed("k")))
        clock.advance(60_000)
        second = await shard.publisher.publish(accepted(keyed("k")))
        assert first.message_ids != second.message_ids
        clock.advance(120_000)
        async with asyncio.timeout(60):
            while await dedupe_rows(shard):
                await asyncio.sleep(0.05)


async def dedupe_rows(shard: Shard) -> int:
    types = [dedupe_key("k")[:2], dedupe_ends_key(0, 0)[:2]]
    database = shard.publisher.commits._database
    spans = [database.scan(head, head + b"\xff") for head in types]
    return sum([len(rows) for span in spans async for rows in span])


def keyed(key: str) -> PublishRun:
    return PublishRun(payloads=[b""], dedupe_keys=[key])


def large(key: str, request_id: str = "") -> Accepted:
    return accepted(PublishRun(payloads=[LARGE], dedupe_keys=[key]), request_id=request_id)


async def test_a_client_that_leaves_after_the_hand_over_changes_nothing() -> None:
    async with opened() as shard:
        leaving = asyncio.create_task(shard.publisher.publish(batch(b"a", request_id="r")))
        await asyncio.sleep(0)
        leaving.cancel()
        answered = await shard.publisher.publish(batch(b"a", request_id="r"))
        assert await sequences(shard) == [answered.first_message_id]


async def test_publishes_at_the_same_time_share_a_commit_and_its_entry() -> None:
    async with opened() as shard:
        answers = await asyncio.gather(
            *(shard.publisher.publish(batch(b"x", b"y")) for _ in range(50))
        )
        first_ids = [answer.first_message_id for answer in answers]
        assert first_ids == list(range(first_ids[0], first_ids[0] + 100, 2))
        assert await sequences(shard) == first_ids[:1]


async def test_entries_are_cut_before_their_headers_grow_too_large() -> None:
    async with opened() as shard:
        answers = await asyncio.gather(
            *(shard.publisher.publish(batch(*[b""] * 50, big="v" * 65_000)) for _ in range(4))
        )
        first = answers[0].first_message_id
        found = await sequences(shard)
        assert found[0] == first
        assert 3 < len(found) < 200
        ids = range(first, first + 200)
        read = await read_messages(shard, *ids)
        assert [message.message_id for message in read.messages] == list(ids)


async def test_bytes_of_blobs_on_their_way_count_towards_the_bound(
    root: Root, store: GatedObjects
) -> None:
    async with opened(root, uncommitted_bytes_max=100_000) as shard:
        slow = asyncio.create_task(shard.publisher.publish(batch(LARGE)))
        await until_uploading(store)
        with pytest.raises(ResourceExhausted):
            await shard.publisher.publish(batch(LARGE, request_id="r"))
        await shard.publisher.publish(batch(b"small"))
        store.gate.set()
        await slow
        assert (await shard.publisher.publish(batch(LARGE, request_id="r"))).message_count == 1
        assert store.writes == 2


async def test_ids_go_on_past_the_block_across_restarts(root: Root) -> None:
    seen: list[int] = []
    for _ in range(3):
        async with opened(root, id_block_size=4) as shard:
            for count in (3, 3, 9, 1):
                answered = await shard.publisher.publish(batch(*[b""] * count))
                first = answered.first_message_id
                seen += range(first, first + count)
    assert seen == sorted(set(seen))
    assert seen[0] == 1


async def test_content_differs_in_its_fingerprint() -> None:
    few: list[dict[str, Any]] = [
        {"delay_ms": 0}, {"delay_ms": 1}, {"visible_at_ms": 1},
        {"dedupe_keys": ["a"]}, {"dedupe_keys": ["b"]}, {"dedupe_keys": ["a"], "delay_ms": 0},
    ]  # fmt: skip
    contents = [
        *(accepted(PublishRun(payloads=[b"ab"], **field)) for field in few),
        accepted(PublishRun(payloads=[b""]), keyed("a")),
        accepted(keyed("a"), PublishRun(payloads=[b""])),
        batch(b"a", b"b"), batch(b"ab"), batch(b"ab", b""), batch(b"", b"ab"), batch(b"b", b"a"),
        batch(b"a", b"b", x="1"), batch(b"a", b"b", x="2"), batch(b"a", b"b", y="1"),
        batch(b"a" + LARGE), batch(b"b" + LARGE), batch(LARGE, b"a"), batch(b"a", LARGE),
    ]  # fmt: skip
    assert len({content.fingerprint() for content in contents}) == len(contents)
    assert batch(b"", x="1", y="2").fingerprint() == batch(b"", y="2", x="1").fingerprint()


async def test_publishes_that_come_while_a_commit_is_filled_are_in_it(root: Root) -> None:
    # Given more publishes than one step of a commit takes
    async with opened(root) as shard:
        commits: list[int] = []
        shard.publisher.commits.on_durable(commits.append)
        waiting = [Waiting(batch(b"%d" % number)) for number in range(3 * STEP_PUBLISHES)]
        assert all(map(shard.publisher.enqueue, waiting))

        # When another comes after the first step
        while not waiting[0].was_drained:
            await asyncio.sleep(0)
        assert not waiting[-1].was_drained
        late = await shard.publisher.publish(batch(b"late"))

        # Then one commit has them all, in their order
        assert len(commits) == 1
        ids = [*(one.answered.first_message_id for one in waiting), late.first_message_id]
        assert ids == list(range(ids[0], ids[0] + len(ids)))
        assert await sequences(shard) == ids[:1]  # one entry of the log
