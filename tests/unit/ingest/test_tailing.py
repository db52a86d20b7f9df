import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ingest.edit.purge_rules import Reason
from services.ingest.edit.purging import Purge
from services.ingest.read.tailing import Update
from slatemq.errors import Unavailable
from tests.forms import examples
from tests.manual_clock import ManualClock
from tests.stored_messages import read_messages
from tests.unit.ingest.shards import accepted, batch, opened, sequences
from tests.unit.ingest.test_purging import GRACE_MS, LONG_S, lasting


class Tailer:
    """One that takes an update when told to, and keeps what it saw."""

    def __init__(self, after: int, updates: AsyncGenerator[Update, None]) -> None:
        self.after = after
        self.updates = updates
        self.seen: list[int] = []

    async def step(self) -> None:
        update = await anext(self.updates)
        self.seen += [sequence for sequence, _ in update.entries]
        assert all(sequence <= update.durable_sequence for sequence in self.seen)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(1, 60)),
        st.tuples(st.just("begin"), st.integers(0, 100)),
        st.tuples(st.just("step"), st.integers(0, 5)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_an_update_has_what_it_may_have_and_one_entry_at_least(cache_bytes: int) -> None:
    async with opened(log_cache_bytes=cache_bytes) as shard:
        for _ in range(12):
            await shard.publisher.publish(batch(b"", size="v" * 1000))
        sizes: list[int] = []
        bound = 5000
        async with aclosing(shard.log.tail(0, lambda: bound)) as updates:
            while sum(sizes) < 12:
                sizes.append(len((await anext(updates)).entries))
                bound = 1

    assert sizes == [4, *[1] * 8]


@settings(deadline=None, max_examples=examples(60))
@given(steps, st.sampled_from([0, 400, 2000, 1 << 20]))
def test_every_tailer_sees_each_entry_once_wherever_it_stands(
    steps: list[tuple[str, int]], cache_bytes: int
) -> None:
    asyncio.run(_tail_through(steps, cache_bytes))


async def _tail_through(steps: list[tuple[str, int]], cache_bytes: int) -> None:
    async with opened(log_cache_bytes=cache_bytes, heartbeat_ms=1) as shard:
        log: list[int] = []
        tailers: list[Tailer] = []
        for step, number in steps:
            if step == "publish":
                answered = await shard.publisher.publish(batch(b"", size="v" * number))
                log.append(answered.first_message_id)
            elif step == "begin":
                after = log[number % len(log)] if log else 0
                tailers.append(Tailer(after, shard.log.tail(after)))
            elif tailers:
                await tailers[number % len(tailers)].step()
        for tailer in tailers:
            expected = [sequence for sequence in log if sequence > tailer.after]
            while len(tailer.seen) < len(expected):
                await tailer.step()
            await tailer.step()
            await tailer.updates.aclose()
            assert tailer.seen == expected
        assert shard.log.streams_count == 0


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_a_tailer_that_begins_inside_an_entry_gets_that_entry_whole(cache_bytes: int) -> None:
    async with opened(log_cache_bytes=cache_bytes, heartbeat_ms=1) as shard:
        first, second = [
            (await shard.publisher.publish(batch(*[b""] * 4))).first_message_id for _ in range(2)
        ]
        for after, expected in (
            (first - 1, [first, second]),
            (first, [first, second]),
            (first + 2, [first, second]),
            (first + 3, [second]),
            (second + 2, [second]),
            (second + 3, []),
        ):
            assert await sequences(shard, after) == expected, after


async def test_an_entry_has_a_thousand_messages_at_most() -> None:
    async with opened(heartbeat_ms=1) as shard:
        first = (await shard.publisher.publish(batch(*[b""] * 2_500))).first_message_id

        assert await sequences(shard) == [first, first + 1024, first + 2048]


@pytest.mark.parametrize("cache_bytes", [0, 500, 5000, 1 << 20])
async def test_tailers_that_run_beside_publishes_miss_nothing(cache_bytes: int) -> None:
    async with opened(log_cache_bytes=cache_bytes, heartbeat_ms=10) as shard:
        done = asyncio.Event()

        async def follow() -> list[int]:
            seen: list[int] = []
            async with aclosing(shard.log.tail(0)) as updates:
                async for update in updates:
                    seen += [sequence for sequence, _ in update.entries]
                    if done.is_set() and seen[-1] == shard.log.end.sequence:
                        break
            return seen

        tailers = [asyncio.create_task(follow()) for _ in range(3)]
        ids: set[int] = set()
        for n in range(60):
            answers = await asyncio.gather(
                *(shard.publisher.publish(batch(b"", n=str(n))) for _ in range(n % 5 + 1))
            )
            ids |= {answer.first_message_id for answer in answers}
            if n % 13 == 0:
                tailers.append(asyncio.create_task(follow()))
        done.set()
        expected = await sequences(shard)
        assert set(expected) <= ids
        for seen in await asyncio.gather(*tailers):
            assert seen == expected


async def test_a_tailer_that_is_up_to_date_gets_the_very_objects_of_the_commit() -> None:
    async with opened() as shard:
        one, two = shard.log.tail(0), shard.log.tail(0)
        await anext(one)
        await anext(two)
        await shard.publisher.publish(batch(b"x"))
        entries = [(await anext(tailer)).entries[0] for tailer in (one, two)]
        assert entries[0][1] is entries[1][1]
        await one.aclose()
        await two.aclose()


async def test_a_waiting_tailer_hears_in_the_turn_in_which_the_publish_is_answered() -> None:
    async with opened() as shard:
        tailer = shard.log.tail(0)
        await anext(tailer)
        update = asyncio.ensure_future(anext(tailer))
        await shard.publisher.publish(batch(b"x"))
        assert update.done()
        await tailer.aclose()


async def test_nothing_is_tailed_or_read_before_it_is_durable() -> None:
    async with opened() as shard:
        first = await shard.publisher.publish(batch(b"x"))
        end = shard.log.end
        publish = asyncio.create_task(shard.publisher.publish(batch(b"y")))
        while not publish.done():
            after = shard.log.end
            read = await read_messages(shard, first.first_message_id + 1)
            if after == shard.log.end == end:
                assert read.messages == []
            await asyncio.sleep(0)
        assert shard.log.end.sequence == (await publish).first_message_id


async def test_closing_ends_every_tailer() -> None:
    async with opened() as shard:
        waiting = shard.log.tail(0)
        await anext(waiting)
        update = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)
        shard.log.close()
        with pytest.raises(Unavailable):
            await update
        with pytest.raises(Unavailable):
            await anext(shard.log.tail(0))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
async def test_a_tailer_behind_what_is_left_of_an_entry_does_not_get_that_entry_again(
    cache_bytes: int,
) -> None:
    clock = ManualClock()
    async with opened(None, clock, heartbeat_ms=20, log_cache_bytes=cache_bytes) as shard:
        messages = [lasting(b"x", LONG_S if n < 4 else 60) for n in range(8)]
        first = (await shard.publisher.publish(accepted(*messages))).first_message_id
        second = (await shard.publisher.publish(accepted(lasting(b"y", LONG_S)))).first_message_id
        clock.advance(60_000 + GRACE_MS + 1)
        await shard.purger.purge(Purge(0, Reason.EXPIRED, [*range(first + 4, first + 8)]))

        for after, expected in (
            (first + 2, [first, second]),
            (first + 3, [second]),
            (first + 4, [second]),
            (first + 6, [second]),
        ):
            assert await sequences(shard, after) == expected, after


async def test_an_update_without_entries_names_no_message_published_while_the_log_was_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    async with opened(None, clock, heartbeat_ms=20, log_cache_bytes=0) as shard:
        gone = (await shard.publisher.publish(accepted(lasting(b"x", 60)))).first_message_id
        clock.advance(60_000 + GRACE_MS + 1)
        await shard.purger.purge(Purge(0, Reason.EXPIRED, [gone]))
        scan = shard.log._database.scan
        published: list[int] = []

        async def scan_beside_a_publish(*span: Any, **how: Any) -> AsyncIterator[Any]:
            async for rows in scan(*span, **how):
                yield rows
            if not published:
                answer = await shard.publisher.publish(accepted(lasting(b"y", LONG_S)))
                published.append(answer.first_message_id)

        monkeypatch.setattr(shard.log._database, "scan", scan_beside_a_publish)
        async with aclosing(shard.log.tail(0)) as updates:
            before, after = await anext(updates), await anext(updates)
        assert (before.entries, before.durable_sequence) == ([], gone)
        assert [sequence for sequence, _ in after.entries] == published
