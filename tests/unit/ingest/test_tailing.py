import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.ingest.reading import Room
from services.ingest.tailing import Update
from slatemq.errors import Unavailable
from tests.forms import examples
from tests.unit.ingest.shards import batch, opened, sequences


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


async def test_a_waiting_tailer_is_told_in_the_turn_in_which_the_publish_is_answered() -> None:
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
            read = await shard.reader.read([first.first_message_id + 1], Room(1000, 1000))
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
