"""Entries of a real broker while its disk is slow or breaks, and while they change all the time."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.storage.database.slate import Database
from services.broker.core.queue import Queue
from services.broker.entries import finished_pages, waiting_pages
from services.broker.entries.waiting_pages import WaitingReader
from services.broker.rpc import entries as entry_servicer
from slatemq.v1 import entry_pb2
from tests.forms import shortly
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DELAYED,
    DONE,
    FAILED,
    IN_FLIGHT,
    MINUTE,
    cancel,
    entries,
    fail,
    find,
    get,
    ids,
    listed,
    reschedule,
)
from tests.integration.broker.outbox.test_outbox import UNANSWERED, Fault
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.manual_clock import ManualClock


async def test_nothing_is_reported_that_a_crash_could_take_back() -> None:
    disk = Disk()
    async with running(disk=disk) as rig:
        await rig.create()
        await rig.assign([1, 2])
        handles = [one.handle for one in await listed(rig, AVAILABLE)]
        disk.free.clear()
        claiming = asyncio.create_task(rig.claim())
        while not rig.owner.shard.queues["q"].leases.count:
            await asyncio.sleep(0.001)
        entry = asyncio.create_task(get(rig, handles[0]))
        listing = asyncio.create_task(ids(rig, IN_FLIGHT))
        asked: list[asyncio.Task[object]] = [
            entry,
            listing,
            asyncio.create_task(get(rig, "q/2")),
            asyncio.create_task(find(rig, 1)),
            asyncio.create_task(cancel(rig, handles[1])),
        ]
        await asyncio.wait([claiming, *asked], timeout=0.3)
        assert not any(task.done() for task in (claiming, *asked))
        disk.free.set()
        await claiming
        assert (await entry).state == IN_FLIGHT
        assert await listing == [1]
        await asyncio.wait(asked)


@pytest.mark.parametrize("kept", [False, True], ids=["lost", "kept"])
@pytest.mark.parametrize("at", shortly(range(1, 5), 1, 3))
async def test_repairs_hold_or_never_were_whichever_commit_fails(
    monkeypatch: pytest.MonkeyPatch, at: int, kept: bool
) -> None:
    disk, clock = Disk(), ManualClock()
    root = memory_root(disk)
    async with running(root, clock, disk=disk) as rig:
        await rig.create()
        await rig.assign([1, 2, 3, 4])
        handles = [one.handle for one in await listed(rig, AVAILABLE)]
    fault = Fault(at, kept)
    monkeypatch.setattr(Database, "flush", lambda database: fault.flush(database))
    later_ms = clock.now_ms() + MINUTE

    async def work(rig: Rig, answered: list[int]) -> None:
        for number, handle in enumerate(handles, 1):
            if number in answered:
                continue
            if number % 2:
                await cancel(rig, handle)
            else:
                await reschedule(rig, handle, later_ms)
            answered.append(number)

    answered: list[int] = []
    async with running(root, clock, disk=disk) as rig:
        try:
            await work(rig, answered)
        except grpc.aio.AioRpcError as error:
            if error.code() not in UNANSWERED:
                raise
    assert fault.struck == (len(answered) < 4)
    async with running(root, clock, disk=disk) as rig:
        waiting, delayed = await ids(rig, AVAILABLE), await ids(rig, DELAYED)
        # What was answered holds; of the one that was not, it did happen or it did not.
        for number in answered:
            assert number not in waiting
            assert (number in delayed) == (number % 2 == 0)
        untouched = [number for number in (1, 2, 3, 4) if number not in answered][1:]
        assert set(untouched) <= set(waiting)
        assert await rig.counts() == {
            name: len(found)
            for name, found in (("available", waiting), ("delayed", delayed))
            if found
        }


async def test_pages_may_be_short_and_go_on_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_pages, "SCANNED_MAX", 3)
    monkeypatch.setattr(finished_pages, "SCANNED_MAX", 3)
    monkeypatch.setattr(finished_pages, "READ_ROWS", 2)
    async with running() as rig:
        await rig.create(max_attempts=1)
        began_ms = rig.clock.now_ms()
        for number in range(1, 12):
            await fail(rig, [number, number + 100])
            rig.clock.advance(1000)
        for backwards in (False, True):
            for from_ms, until_ms, numbers in (
                (0, 0, range(1, 12)),
                (began_ms + 5000, 0, range(6, 12)),
                (0, began_ms + 5000, range(1, 6)),
            ):
                result = await ids(
                    rig,
                    FAILED,
                    newest_first=backwards,
                    finished_from_ms=from_ms,
                    finished_until_ms=until_ms,
                )
                expected = [n + more for n in numbers for more in (0, 100)]
                assert result == (expected[::-1] if backwards else expected)
        deadline_ms = rig.clock.now_ms() + 1000
        await rig.assign(range(201, 231), retention_deadlines_ms=[deadline_ms] * 29 + [0])
        rig.clock.advance(1000)
        assert await ids(rig, AVAILABLE) == [230]


async def test_a_search_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_servicer, "PROGRESS_S", 0.0)
    async with running() as rig:
        for name in ("a", "b", "c"):
            await rig.create(name, max_attempts=1)
        for number in range(1, 6):
            await fail(rig, [number], queue_id="b")
        answers = await find(rig, 4)
        searched = [one.queues_searched_count for one in answers]
        assert {0, 1, 2, 3} >= set(searched) >= {1, 2, 3}
        assert searched == sorted(searched)
        read = [one.rows_read_count for one in answers]
        assert read == sorted(read)
        assert read[-1] >= 5
        found = [place for place, one in enumerate(answers) if one.entries]
        assert len(found) == 1
        assert answers[found[0]].queues_searched_count == 1, "it is told as soon as it is found"


async def test_a_search_can_be_left() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 100))
        call = entries(rig).FindMessage(entry_pb2.FindMessageRequest(message_id=50))
        assert len((await call.read()).entries) == 1
        call.cancel()
        assert (await get(rig, "q/32")).message_id == 50


async def test_an_entry_that_runs_through_its_states_is_always_found() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        last, working = 0, True
        found: set[int] = set()

        async def work() -> None:
            nonlocal last
            for number in range(1, 120):
                await rig.assign([number])
                last = number
                [claimed] = await rig.claim()
                rig.clock.advance(1)
                if number % 2:
                    await rig.ack(claimed.lease_token)
                else:
                    await rig.nack(claimed.lease_token)

        async def look() -> None:
            number = 1
            while working:
                before = last
                try:
                    value = await get(rig, f"q/{number:x}")
                except grpc.aio.AioRpcError as error:
                    assert error.code() == grpc.StatusCode.NOT_FOUND  # noqa: PT017
                    assert number > before, "it was there before it was asked for"
                    continue
                found.add(value.state)
                number += value.state in (DONE, FAILED)

        looking = [asyncio.create_task(look()) for _ in range(3)]
        await work()
        working = False
        await asyncio.gather(*looking)
        for number in range(1, 120):
            assert (await get(rig, f"q/{number:x}")).state in (DONE, FAILED)
        assert found >= {DONE, FAILED}


async def test_what_moves_behind_a_searchs_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1, 2, 3])
        chunks = WaitingReader.chunks

        async def later(reader: WaitingReader, queue: Queue, first_ms: int = 0) -> Any:
            # Leases were looked at: now it is claimed, and does not wait any more.
            [claimed] = await rig.claim()
            if claimed.message.message_id == 2:
                await rig.ack(claimed.lease_token)
            async for chunk in chunks(reader, queue, first_ms):
                yield chunk

        monkeypatch.setattr(WaitingReader, "chunks", later)
        assert (await get(rig, "q/1")).state == IN_FLIGHT
        assert (await get(rig, "q/2")).state == DONE
        found = [entry.state for answer in await find(rig, 3) for entry in answer.entries]
        assert found == [IN_FLIGHT]
