"""Lists that are long: whoever reads one lets the others have their turns."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from libs.storage.records.queues import FailedMessage, decode_failed
from services.broker.core.lists.finished_lists import LIST_ROW_MAX
from services.broker.core.redrives import RedriveStep
from services.broker.dead_letters import redrive_runner
from services.broker.dead_letters.redrive_runner import RedriveRunner
from services.broker.entries import finished_pages
from services.broker.entries.finished_pages import DECODED_MAX
from services.broker.requests.queues import with_counts
from services.broker.rpc import queues as queue_servicer
from slatemq.v1 import queue_pb2
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    FAILED,
    fail,
    find,
    get,
    ids,
    listed,
    redriven,
)
from tests.integration.broker.rig import Rig, running

LETTERS = 7_000


class Turns:
    """How many dead letters were decoded at most while no one else had a turn."""

    def __init__(self) -> None:
        self.most = 0
        self._since = 0

    def decode(self, data: bytes) -> list[FailedMessage]:
        found = decode_failed(data)
        self._since += len(found)
        self.most = max(self.most, self._since)
        return found

    async def others(self) -> None:
        while True:
            self._since = 0
            await asyncio.sleep(0)


@asynccontextmanager
async def letters_of_one_commit(turns: Turns) -> AsyncIterator[Rig]:
    async with running() as rig:
        await rig.create(max_attempts=1)

        def add(now_ms: int) -> None:
            queue = rig.owner.queue("q")
            queue.failed.add(
                FailedMessage(number, now_ms, 1, 128, 0, "no") for number in range(1, LETTERS + 1)
            )
            queue.touch()

        await rig.owner.run(add)
        await rig.owner.durable()
        others = asyncio.create_task(turns.others())
        yield rig
        others.cancel()


async def test_no_call_blocks_others_while_a_long_list_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns()
    monkeypatch.setattr(finished_pages, "decode_failed", turns.decode)
    async with letters_of_one_commit(turns) as rig:
        everything = [*range(1, LETTERS + 1)]
        entries = await listed(rig, FAILED)
        assert [one.message_id for one in entries] == everything
        assert await ids(rig, FAILED, page_size=999, newest_first=True) == everything[::-1]
        assert (await get(rig, entries[-1].handle)).message_id == LETTERS
        assert (await get(rig, f"q/{LETTERS:x}")).message_id == LETTERS
        [found] = [one for answer in await find(rig, 3000) for one in answer.entries]
        assert found.message_id == 3000

        wanted = [1, 2500, LETTERS]
        result = await redriven(rig, message_ids=wanted)

        assert (result.examined_count, result.redriven_count) == (LETTERS, 3)
        assert await ids(rig, AVAILABLE) == wanted
        assert (await redriven(rig)).redriven_count == LETTERS - 3
        assert await rig.counts() == {"available": LETTERS}
    assert 0 < turns.most <= LIST_ROW_MAX + DECODED_MAX


async def test_a_step_looks_at_a_bounded_number_of_rows_however_few_dead_letters_they_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given letters in rows of their own, and a step that may look at five
    monkeypatch.setattr(redrive_runner, "STEP_LOOKED_AT", 5 * (redrive_runner.ROW_COST + 1))
    async with running() as rig:
        await rig.create(max_attempts=1)
        for number in range(1, 31):
            await fail(rig, [number])
        steps: list[int] = []
        apply = RedriveRunner._apply

        def counted(
            self: RedriveRunner, number: int, rows: Sequence[RedriveStep], *rest: Any
        ) -> int:
            steps.append(len(rows))
            return apply(self, number, rows, *rest)

        monkeypatch.setattr(RedriveRunner, "_apply", counted)

        # When one of the last is redriven by its ID
        result = await redriven(rig, message_ids=[29])

        # Then no step held the others up for all that lies before it
        assert (result.examined_count, result.redriven_count) == (30, 1)
        assert steps == [5] * 6


QUEUES, PRIORITIES = 12, 7


async def test_no_call_is_blocked_while_queues_of_many_priorities_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given queues with messages of several priorities, more than are told in one step
    parts = PRIORITIES + queue_servicer.QUEUE_PARTS
    monkeypatch.setattr(queue_servicer, "LISTED_PARTS", 2 * parts)
    ids = [f"q{number:02}" for number in range(QUEUES)]
    numbers = range(1, PRIORITIES + 1)
    made_since, most = 0, 0
    async with running() as rig:
        for queue_id in ids:
            await rig.create(queue_id)
            await rig.assign(numbers, queue_id, priorities=numbers)

        def counted(*value: Any) -> queue_pb2.Queue:
            nonlocal made_since, most
            made_since += 1
            most = max(most, made_since)
            return with_counts(*value)

        def delete(_: int) -> None:
            for queue_id in (ids[0], ids[-1]):
                rig.owner.shard.delete_queue(rig.owner.queue(queue_id))

        async def others() -> None:
            """Have their turns; in the first after the list was begun one deletes two queues."""
            nonlocal made_since
            while True:
                if made_since and ids[0] in rig.owner.shard.queues:
                    await rig.owner.run(delete)
                made_since = 0
                await asyncio.sleep(0)

        monkeypatch.setattr(queue_servicer, "with_counts", counted)
        task = asyncio.create_task(others())

        # When they are listed
        request = queue_pb2.ListQueuesRequest(page_size=QUEUES - 1)
        first = await rig.queues.ListQueues(request)
        request.page_token = first.next_page_token
        second = await rig.queues.ListQueues(request)

        # Then the others had turns, and no queue is missing or told twice but what they deleted
        task.cancel()
        assert most == 2
        items = [*first.queues, *second.queues]
        assert [queue.queue_id for queue in items] == ids[:-1]
        for queue in items:
            counts = queue.counts.by_priority
            assert [(one.priority, one.available_count) for one in counts] == [
                (number, 1) for number in numbers
            ]
