"""Replays between the real processes, killed at will; judged from outside."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from slatemq.v1 import queue_pb2
from tests.forms import proof
from tests.integration.stack.processes import WAIT_SECONDS, Service, Stack, running

pytestmark = pytest.mark.slow  # Four processes start, and each of them again.


class Sent(NamedTuple):
    """A batch that was published."""

    received_at_ms: int
    ids: list[int]
    kinds: list[str]


@pytest.mark.parametrize("again", [0, proof(2)])
async def test_each_message_comes_once_however_late_its_queue_and_whichever_process_is_killed(
    tmp_path: Path, again: int
) -> None:
    """The full form kills two services again."""
    chance = random.Random(1)
    sent: list[Sent] = []
    made: dict[str, tuple[str, int | None]] = {}  # Kind, and since when.

    async def publish(stack: Stack, until: asyncio.Task[None]) -> None:
        while not until.done():
            kinds = [chance.choice("abc") for _ in range(chance.randint(1, 4))]
            answer = await stack.publish_answer(*kinds)
            sent.append(Sent(answer.received_at_ms, list(answer.message_ids), kinds))

    async def create(stack: Stack) -> None:
        queue_id, kind = f"late{len(made)}", chance.choice("abc")
        source = f'headers["kind"] == "{kind}"'
        if chance.random() < 0.5 or not sent:
            await stack.create_queue(queue_id, source, start_from_beginning=1)
            made[queue_id] = (kind, None)
        else:
            since_ms = chance.choice(sent).received_at_ms
            await stack.create_queue(queue_id, source, start_from_ms=since_ms)
            made[queue_id] = (kind, since_ms)

    async def kill(stack: Stack) -> None:
        victims: list[Service] = [*stack.all, *[stack.broker, stack.routers[0]][:again]]
        chance.shuffle(victims)
        for victim in victims:
            creating = asyncio.create_task(create(stack))
            await asyncio.sleep(chance.random() / 20)
            await victim.kill()
            await asyncio.sleep(chance.random() / 20)
            await victim.start()
            await creating

    async with running(tmp_path) as stack:
        for kind in "abc":
            await stack.create_queue(f"always-{kind}", f'headers["kind"] == "{kind}"')
        killing = asyncio.create_task(kill(stack))
        await asyncio.gather(publish(stack, killing), killing)
        await stack.routed()

        def of(kind: str, since_ms: int = 0) -> Counter[int]:
            return Counter(
                message_id
                for batch in sent
                if batch.received_at_ms >= since_ms
                for message_id, k in zip(batch.ids, batch.kinds, strict=True)
                if k == kind
            )

        for kind in "abc":
            assert await stack.drained(f"always-{kind}") == of(kind)
        await asyncio.gather(*map(stack.replayed, made))
        drained = await asyncio.gather(*map(stack.drained, made))
        for (queue_id, (kind, since_ms)), got in zip(made.items(), drained, strict=True):
            # Later than asked for is never too late; what was not routed yet came, too.
            assert set(got.values()) <= {1}, queue_id
            assert of(kind, since_ms or 0).keys() <= got.keys() <= of(kind).keys(), queue_id
            if since_ms is None:
                assert got == of(kind), queue_id


async def test_a_queue_from_a_time_begins_exactly_there(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        answers = [await stack.publish_answer("a", "b") for _ in range(6)]
        await stack.create_queue("any", "true")
        await stack.routed()

        async def got_since(since_ms: int) -> Counter[int]:
            await stack.create_queue(f"from-{since_ms}", "true", start_from_ms=since_ms)
            await stack.replayed(f"from-{since_ms}")
            return await stack.drained(f"from-{since_ms}")

        times = sorted({answer.received_at_ms for answer in answers})
        for since_ms, got in zip(times, await asyncio.gather(*map(got_since, times)), strict=True):
            later = [answer for answer in answers if answer.received_at_ms >= since_ms]
            assert got == Counter(i for answer in later for i in answer.message_ids)


async def test_progress_counts_messages_over_restarts_of_ingest_and_broker(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        # Given messages from three lives of an ingest, whose IDs jump at each restart
        ids: list[int] = []
        for life in range(3):
            if life:
                await stack.ingest.kill()
                await stack.ingest.start()
            for _ in range(4):
                ids += await stack.publish(*["a"] * 300)
        assert ids[-1] - ids[0] > 10 * len(ids), "the IDs jump"
        await stack.create_queue("any", "true")
        await stack.routed()

        # When a queue gets them all, and the broker dies in the middle
        await stack.create_queue("late", "true", start_from_beginning=1)
        replays: list[queue_pb2.Replay] = []
        async with asyncio.timeout(WAIT_SECONDS):
            while not replays or not replays[-1].replayed_count:
                replays.append(await stack.replay("late"))
        await stack.broker.kill()
        await stack.broker.start()
        async with asyncio.timeout(WAIT_SECONDS):
            while not replays[-1].done:
                replays.append(await stack.replay("late"))

        # Then its progress never goes back, and is out of all messages from its first piece on
        done_counts = [one.replayed_count for one in replays]
        assert done_counts == sorted(done_counts)
        assert {one.message_count for one in replays if one.replayed_count} == {len(ids)}
        assert done_counts[-1] == len(ids)
        assert await stack.drained("late") == Counter(ids)
