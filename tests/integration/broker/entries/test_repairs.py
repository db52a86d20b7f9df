"""Repairs on a real broker: entries cancelled, rescheduled, and found in all queues."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from slatemq.v1 import entry_pb2
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DELAYED,
    FAILED,
    IN_FLIGHT,
    cancel,
    entries,
    find,
    get,
    ids,
    listed,
    one_of_each,
    reschedule,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Rig, refusal, running
from tests.manual_clock import ManualClock

NOT_FOUND = grpc.StatusCode.NOT_FOUND
REFUSED = grpc.StatusCode.FAILED_PRECONDITION
MINUTE = 60_000

ATTEMPTS = entry_pb2.ENTRY_VIEW_ATTEMPTS

Call = Callable[[Rig, str], Awaitable[Any]]
CALLS: dict[str, Call] = {
    "cancel": cancel,
    "reschedule": lambda rig, handle: reschedule(rig, handle, 5),
    "edit": lambda rig, handle: entries(rig).EditMessage(
        entry_pb2.EditMessageRequest(handle=handle, payload=b"x")
    ),
}


# --- Cancel and reschedule ----------------------------------------------------------------


@pytest.mark.parametrize("cold", [False, True], ids=["hot", "cold"])
async def test_a_cancelled_entry_is_never_delivered(tmp_path: Path, cold: bool) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create()
        for first in range(1, 5002, 1000):
            await rig.assign(range(first, first + 1000))
        await rig.assign([9001, 9002], visible_at_ms=[clock.now_ms() + MINUTE] * 2)
        handles = {
            one.message_id: one.handle
            for state in (AVAILABLE, DELAYED)
            for one in await listed(rig, state)
        }
        if not cold:
            for number in (1, 3500, 6000, 9001):
                await cancel(rig, handles[number])
    async with running(tmp_path, clock) as rig:
        if cold:
            for number in (1, 3500, 6000, 9001):
                await cancel(rig, handles[number])
        for number in (1, 3500, 6000, 9001):
            refused = await refusal(cancel(rig, handles[number]))
            assert refused[:2] == (NOT_FOUND, "ENTRY_UNKNOWN")
        assert await rig.counts() == {"available": 5997, "delayed": 1}
    async with running(tmp_path, clock) as rig:
        clock.advance(MINUTE)
        claimed = set()
        while part := await rig.claim(max_messages=10_000):
            claimed |= {one.message.message_id for one in part}
        assert claimed == {*range(1, 6001), 9001, 9002} - {1, 3500, 6000, 9001}


@pytest.mark.parametrize("name", ["cancel", "reschedule", "edit"])
async def test_what_does_not_wait_is_not_changed(name: str) -> None:
    call = CALLS[name]
    async with running() as rig:
        handles = await one_of_each(rig)
        before = await rig.counts()
        for number in (3, 4, 5):
            for handle in (handles[number], f"q/{number}"):
                assert (await refusal(call(rig, handle)))[:2] == (REFUSED, "WRONG_STATE")
        # What waits no more since its handle was given, too.
        [claimed] = await rig.claim()
        assert claimed.message.message_id == 1
        assert (await refusal(call(rig, handles[1])))[:2] == (REFUSED, "WRONG_STATE")
        after = await rig.counts()
        assert after == {"delayed": 1, "in_flight": 2, "done": 1, "failed": 1}
        assert before == {**after, "in_flight": 1, "available": 1}


async def test_a_rescheduled_entry_comes_at_its_new_time(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        handles = await one_of_each(rig)
        later = await reschedule(rig, handles[1], clock.now_ms() + 2 * MINUTE)
        assert (later.state, later.visible_at_ms) == (DELAYED, clock.now_ms() + 2 * MINUTE)
        assert await get(rig, later.handle) == later
        at_once = await reschedule(rig, handles[2], 1)
        assert (at_once.state, at_once.visible_at_ms) == (AVAILABLE, 0)
        assert await rig.counts() == {"available": 1, "delayed": 1, "in_flight": 1, "done": 1,
                                      "failed": 1}  # fmt: skip
    async with running(tmp_path, clock) as rig:
        assert await get(rig, later.handle) == later
        [claimed] = await rig.claim(max_messages=9)
        assert claimed.message.message_id == 2
        assert (await get(rig, at_once.handle)).state == IN_FLIGHT
        # Moved to the end of time it never comes, and can be moved back.
        last = await reschedule(rig, later.handle, (1 << 63) - 1)
        assert last.visible_at_ms == (1 << 63) - 1
        clock.advance(3 * MINUTE)
        assert await rig.claim(max_messages=9) == []
        assert (await get(rig, last.handle)).state == DELAYED
        await reschedule(rig, last.handle, 0)
        [claimed] = await rig.claim(max_messages=9)
        assert claimed.message.message_id == 1


async def test_a_rescheduled_entry_wakes_who_waits() -> None:
    async with running() as rig:
        handles = await one_of_each(rig)
        await cancel(rig, handles[1])
        waiting = asyncio.create_task(rig.claim(wait_ms=60_000))
        await asyncio.sleep(0.05)
        await reschedule(rig, handles[2], 0)
        [claimed] = await waiting
        assert claimed.message.message_id == 2


async def test_a_queue_re_created_knows_nothing_of_old_handles() -> None:
    async with running() as rig:
        handles = await one_of_each(rig)
        await delete(rig)
        assert (await refusal(get(rig, handles[1])))[0] == NOT_FOUND
        async with asyncio.timeout(60):
            while True:
                try:
                    await rig.create()
                    break
                except grpc.aio.AioRpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        raise
        await rig.assign([9])
        for handle in handles.values():
            refused = await refusal(get(rig, handle))
            assert refused[:2] == (NOT_FOUND, "ENTRY_UNKNOWN")
        assert await ids(rig, AVAILABLE) == [9]


# --- Find -----------------------------------------------------------------------------------


async def test_a_message_is_found_in_all_its_queues_with_its_history(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        for queue_id in ("a", "b", "c"):
            await one_of_each(rig, queue_id)
        await rig.create("empty")
        await rig.assign([7], "a")
        await rig.assign([7], "b", visible_at_ms=[clock.now_ms() + MINUTE])
    async with running(tmp_path, clock) as rig:
        for _ in range(2):
            answers = await find(rig, 5)
            found = [entry for answer in answers for entry in answer.entries]
            assert sorted(entry.queue_id for entry in found) == ["a", "b", "c"]
            assert {entry.state for entry in found} == {FAILED}
            assert {one.outcome for entry in found for one in entry.attempts} == {"nack: broken"}
            for entry in found:
                assert (await get(rig, entry.handle, ATTEMPTS)) == entry
            last = answers[-1]
            assert (last.queues_searched_count, last.queues_count) == (4, 4)
            assert last.rows_read_count >= 3
            counts = [answer.queues_searched_count for answer in answers]
            assert counts == sorted(counts)
            rig.ingest.down = True  # when it was received is not known then
        rig.ingest.down = False
        answers = await find(rig, 7, "b", "a", "b", "none")
        found = [entry for answer in answers for entry in answer.entries]
        assert [(one.queue_id, one.state) for one in found] == [("b", DELAYED), ("a", AVAILABLE)]
        assert (answers[-1].queues_searched_count, answers[-1].queues_count) == (3, 3)
        [answer] = await find(rig, 99)
        assert (list(answer.entries), answer.queues_searched_count) == ([], 4)


async def test_a_message_that_is_there_twice_is_found_twice() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1])
        await rig.assign([1, 2, 1], priorities=[5, 5, 5])
        found = [entry.state for answer in await find(rig, 1) for entry in answer.entries]
        assert found == [AVAILABLE] * 3
        claimed = await rig.claim(max_messages=3)
        await rig.nack(*(one.lease_token for one in claimed))
        found = [entry.state for answer in await find(rig, 1) for entry in answer.entries]
        assert sorted(found) == sorted([AVAILABLE, FAILED, FAILED])
