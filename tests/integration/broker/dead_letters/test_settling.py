"""Settling dead letters of a real broker: all of a call or nothing, each letter once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from libs.storage.database.blobs import Blobs
from services.broker.dead_letters import mover, redrive_runner
from services.broker.outbox import pusher
from slatemq._rpc.rpc_status import from_rpc_error
from slatemq.errors import FailedPrecondition, InvalidArgument, NotFound, SlateMQError
from slatemq.v1 import entry_pb2, queue_pb2
from slatemq.v1.entry_pb2 import (
    DeadLetterSettlement,
    DropDeadLetter,
    RedriveDeadLetter,
    ReplaceDeadLetter,
    SettleDeadLettersRequest,
)
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DONE,
    FAILED,
    entries,
    fail,
    fail_again,
    get,
    ids,
    listed,
    redriven,
)
from tests.integration.broker.outbox.pushes import Pushes
from tests.integration.broker.rig import Disk, Rig, memory_root, running
from tests.integration.waiting import WAIT_SECONDS, eventually
from tests.manual_clock import ManualClock, ManualSeconds

WITH_ATTEMPTS = entry_pb2.ENTRY_VIEW_ATTEMPTS


def redrive(handle: str, note: str = "") -> DeadLetterSettlement:
    return DeadLetterSettlement(handle=handle, redrive=RedriveDeadLetter(), note=note)


def drop(handle: str, note: str = "") -> DeadLetterSettlement:
    return DeadLetterSettlement(handle=handle, drop=DropDeadLetter(), note=note)


def replace(handle: str, payload: bytes, **headers: str) -> DeadLetterSettlement:
    return DeadLetterSettlement(
        handle=handle, replace=ReplaceDeadLetter(payload=payload, headers=headers)
    )


async def settle(rig: Rig, *each: DeadLetterSettlement, request_id: str = "") -> None:
    request = SettleDeadLettersRequest(settlements=each, request_id=request_id, consumer_id="ann")
    await entries(rig).SettleDeadLetters(request)


async def refused(rig: Rig, *each: DeadLetterSettlement, request_id: str = "") -> SlateMQError:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await settle(rig, *each, request_id=request_id)
    return from_rpc_error(failure.value)


async def dead_letters(rig: Rig, count: int, **settings: Any) -> list[str]:
    """The handles of this many dead letters, 1 and on."""
    await rig.create(max_attempts=1, **settings)
    await fail(rig, range(1, count + 1))
    return [entry.handle for entry in await listed(rig, FAILED)]


async def test_dead_letters_come_back_go_and_are_replaced_and_it_stays_so() -> None:
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        one, two, three, four, _ = await dead_letters(rig, 5)
        noted = DeadLetterSettlement(handle=four, note="asked the customer")

        await settle(
            rig, redrive(one, "the street exists"), drop(two), replace(three, b"3", k="v"), noted
        )
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        assert await rig.counts() == {"available": 1, "done": 2, "failed": 2}
        [back] = await listed(rig, AVAILABLE, view=WITH_ATTEMPTS)
        assert (back.message_id, back.attempts_count) == (1, 0)
        assert [attempt.outcome for attempt in back.attempts] == [
            "nack: no", "note: the street exists"
        ]  # fmt: skip
        done = await listed(rig, DONE)
        assert [(o.message_id, o.consumer_id, o.transferred_to) for o in done] == [
            (2, "ann", ""), (3, "ann", "q")
        ]  # fmt: skip
        left = await listed(rig, FAILED, view=WITH_ATTEMPTS)
        assert [entry.message_id for entry in left] == [4, 5]
        assert left[0].attempts[-1].outcome == "note: asked the customer"
        assert left[0].attempts[-1].consumer_id == "ann"
        await eventually(pushes.payloads)
        [pushed] = pushes.stored[0]
        assert (pushed.queue_id, pushed.payload) == ("q", b"3")
        assert dict(pushed.headers) == {"k": "v"}


async def test_when_one_dead_letter_is_gone_nothing_happens_to_the_others() -> None:
    pushes = Pushes()
    async with running(pushes=pushes) as rig:
        one, two, three = await dead_letters(rig, 3)
        await settle(rig, drop(two))

        error = await refused(rig, redrive(one), replace(three, b"x"), drop(two))

        assert isinstance(error, NotFound)
        assert (error.reason, error.metadata["settlement"]) == ("ENTRY_UNKNOWN", "2")
        assert await ids(rig, FAILED) == [1, 3]
        assert await rig.counts() == {"failed": 2, "done": 1}
        twice = await refused(rig, redrive(one), drop(one))
        assert (twice.reason, twice.metadata["settlement"]) == ("ENTRY_UNKNOWN", "1")
        assert not pushes.payloads()


async def test_a_dead_letter_that_failed_again_is_another_one() -> None:
    clock = ManualClock()
    async with running(clock=clock) as rig:
        [old] = await dead_letters(rig, 1)
        await redriven(rig)
        clock.advance(1000)
        await fail_again(rig, 1, "again")
        [new] = [entry.handle for entry in await listed(rig, FAILED)]

        error = await refused(rig, drop(old))

        assert error.reason == "ENTRY_UNKNOWN"
        await settle(rig, drop(new))
        assert await rig.counts() == {"done": 1}


async def test_a_repeat_does_nothing_and_other_content_under_its_id_is_refused() -> None:
    disk, clock, pushes = Disk(), ManualClock(), Pushes()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        one, two = await dead_letters(rig, 2)
        await settle(rig, replace(one, b"new"), request_id="r")
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await settle(rig, replace(one, b"new"), request_id="r")

        error = await refused(rig, replace(one, b"newer"), request_id="r")

        assert (error.reason, await ids(rig, FAILED)) == ("REQUEST_ID_REUSED", [2])
        await eventually(pushes.payloads)
        await settle(rig, replace(two, b"other"), request_id="s")
        await eventually(lambda: len(pushes.payloads()) == 2)
        assert pushes.payloads() == [b"new", b"other"]


async def test_calls_for_the_same_dead_letters_at_the_same_time_settle_each_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mover, "LOCK_S", WAIT_SECONDS)
    pushes = Pushes()
    async with running(pushes=pushes) as rig:
        handles = await dead_letters(rig, 60)

        async def replaced(handle: str, by: int) -> bool:
            try:
                await settle(rig, replace(handle, b"%d" % by))
            except grpc.aio.AioRpcError as error:
                reasons.add(from_rpc_error(error).reason)
                return False
            return True

        # A redrive runs beside them
        reasons: set[str] = set()
        moving = asyncio.create_task(redriven(rig, message_ids=range(1, 31)))
        calls = (replaced(handle, by) for handle in handles for by in range(3))
        results = await asyncio.gather(*calls)
        moved = await moving

        assert reasons == {"ENTRY_UNKNOWN"}
        counts = await rig.counts()
        assert counts == {
            name: count
            for name, count in (("available", moved.redriven_count), ("done", sum(results)))
            if count
        }
        assert moved.redriven_count + sum(results) == 60
        await eventually(lambda: len(pushes.payloads()) == sum(results))


async def test_a_redrive_that_runs_stays_at_its_message_when_dead_letters_before_it_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, seconds = ManualClock(), ManualSeconds()
    monkeypatch.setattr(redrive_runner, "time", SimpleNamespace(monotonic=seconds))
    async with running(clock=clock) as rig:
        handles = await dead_letters(rig, 300)
        # Given a redrive in the middle of the row
        begun = await entries(rig).StartRedrive(
            entry_pb2.StartRedriveRequest(queue_id="q", rate=100, filter="attempts == 1")
        )
        await eventually(lambda: rig.owner.shard.redrives.get(1).examined_count > 0)  # type: ignore[union-attr]

        # When letters that it has not come to yet are settled one by one
        for handle in handles[200:250]:
            await settle(rig, drop(handle))
        while (
            now := await entries(rig).GetRedrive(
                entry_pb2.GetRedriveRequest(redrive_id=begun.redrive.redrive_id)
            )
        ).redrive.state == entry_pb2.Redrive.STATE_RUNNING:
            seconds.now_s += 1
            await asyncio.sleep(0.01)

        # Then it has moved all others, and none twice
        assert now.redrive.redriven_count == 250
        assert await rig.counts() == {"available": 250, "done": 50}
        back = await ids(rig, AVAILABLE)
        assert sorted(back) == [*range(1, 201), *range(251, 301)]


async def test_a_dead_letter_past_its_retention_does_not_come_back() -> None:
    clock = ManualClock()
    async with running(clock=clock) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1], retention_deadlines_ms=[clock.now_ms() + 5000])
        await fail_again(rig, 1)
        [dead_letter] = await listed(rig, FAILED)
        clock.advance(6000)

        error = await refused(rig, redrive(dead_letter.handle))

        assert isinstance(error, FailedPrecondition)
        assert (error.reason, error.metadata["settlement"]) == ("DEAD_LETTER_EXPIRED", "0")
        # What replaces it would have the same end: no one would get it either.
        assert (
            await refused(rig, replace(dead_letter.handle, b"x"))
        ).reason == "DEAD_LETTER_EXPIRED"
        await settle(rig, drop(dead_letter.handle))
        assert await rig.counts() == {"done": 1}


async def test_what_replaces_a_dead_letter_keeps_its_end_and_may_be_large() -> None:
    clock, pushes, disk = ManualClock(), Pushes(), Disk()
    root = memory_root(disk)
    async with running(root, clock, disk=disk, pushes=pushes) as rig:
        await rig.create(max_attempts=1)
        ends_ms = clock.now_ms() + 5000
        await rig.assign([1, 2], retention_deadlines_ms=[ends_ms, 0])
        await fail_again(rig, 2)
        one, two = [entry.handle for entry in await listed(rig, FAILED)]

        await settle(rig, replace(one, bytes(100_000)), replace(two, b"small"))

        await eventually(lambda: len(pushes.stored.get(0, ())) == 2)
        large, small = pushes.stored[0]
        assert large.retention_deadline_ms == ends_ms
        assert await Blobs(root).get(large.payload_uri) == bytes(100_000)
        assert small.retention_deadline_ms == 0


async def test_the_largest_payload_replaces_a_dead_letter_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pusher, "PUSHES_BYTES_MAX", 200_000)
    async with running(pushes=Pushes(), settings={"payload_bytes_max": 200_000}) as rig:
        one, two = await dead_letters(rig, 2)

        error = await refused(rig, drop(one), replace(two, bytes(200_000)))
        assert isinstance(error, InvalidArgument)
        assert error.field == "settlements[1]"

        await settle(rig, replace(two, bytes(200_000)))
        assert await rig.counts() == {"failed": 1, "done": 1}


async def test_bad_input_names_its_field_and_changes_nothing() -> None:
    async with running(settings={"payload_bytes_max": 1000}) as rig:
        [good] = await dead_letters(rig, 1)
        await rig.create("other", max_attempts=1)
        bad: list[tuple[str, list[DeadLetterSettlement]]] = [
            ("settlements", []),
            ("settlements", [drop(good)] * 1001),
            ("settlements[0].handle", [drop("")]),
            ("settlements[0].handle", [drop("q/1")]),
            ("settlements[0].handle", [drop("q/1/d5")]),
            ("settlements[0].handle", [drop("q/x/f5")]),
            ("settlements[1].handle", [drop(good), drop("other/1/f5")]),
            ("settlements[1]", [drop(good), DeadLetterSettlement(handle=good)]),
            ("settlements[0].note", [drop(good, "x" * 1025)]),
            ("settlements[0].replace.payload", [replace(good, bytes(1001))]),
            ('settlements[0].replace.headers["k"]', [replace(good, b"", k="x" * 65_536)]),
        ]
        for field, each in bad:
            error = await refused(rig, *each)
            assert isinstance(error, InvalidArgument), (field, error)
            assert error.field == field
        error = await refused(rig, drop(good), request_id="x" * 129)
        assert isinstance(error, InvalidArgument)
        assert error.field == "request_id"
        assert (await refused(rig, drop("nosuch/1/f5"))).reason == "QUEUE_NOT_FOUND"
        assert await rig.counts() == {"failed": 1}
        assert (await get(rig, good)).state == queue_pb2.ENTRY_STATE_FAILED


async def test_after_a_purge_the_dead_letters_are_gone() -> None:
    async with running() as rig:
        [handle] = await dead_letters(rig, 1)
        await rig.queues.PurgeQueue(queue_pb2.PurgeQueueRequest(queue_id="q", states=[FAILED]))

        assert (await refused(rig, drop(handle))).reason == "ENTRY_UNKNOWN"
        assert await rig.counts() == {}
