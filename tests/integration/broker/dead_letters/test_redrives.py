"""Redrives of a real broker: which dead letters move, how far it tells, and who may stop it."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from slatemq.v1 import entry_pb2, message_pb2, queue_pb2
from tests.integration.broker.entries.delayed_rows import watching
from tests.integration.broker.entry_calls import (
    AVAILABLE,
    DELAYED,
    FAILED,
    RUNNING,
    ended,
    entries,
    fail,
    fail_again,
    ids,
    listed,
    redrive,
    redriven,
    start,
    until,
)
from tests.integration.broker.queue_calls import delete
from tests.integration.broker.rig import Rig, refusal, running
from tests.manual_clock import ManualClock

INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
DONE = entry_pb2.Redrive.STATE_DONE
CANCELLED = entry_pb2.Redrive.STATE_CANCELLED
BROKEN_OFF = entry_pb2.Redrive.STATE_FAILED


def progress(one: entry_pb2.Redrive) -> tuple[int, int, int]:
    return one.total_count, one.examined_count, one.redriven_count


async def cancelled(rig: Rig, redrive_id: str) -> entry_pb2.Redrive:
    request = entry_pb2.CancelRedriveRequest(redrive_id=redrive_id)
    return (await entries(rig).CancelRedrive(request)).redrive  # type: ignore[no-any-return]


async def resumed(rig: Rig, redrive_id: str) -> entry_pb2.Redrive:
    request = entry_pb2.ResumeRedriveRequest(redrive_id=redrive_id)
    return (await entries(rig).ResumeRedrive(request)).redrive  # type: ignore[no-any-return]


# --- Which move ---------------------------------------------------------------


async def test_all_dead_letters_come_back_behind_what_waits_with_their_history(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create(max_attempts=1)
        await rig.assign([1, 2, 3], priorities=[7, 8, 7])
        await fail_again(rig, 3, "broken")
        await rig.assign([4], priorities=[7])
        clock.advance(5)

        one = await start(rig)
        assert (one.queue_id, one.target_queue_id, one.filter) == ("q", "q", "")
        assert (one.created_at_ms, one.total_count) == (clock.now_ms(), 3)
        one = await ended(rig, one.redrive_id)

        assert (one.state, progress(one), one.ended_at_ms) == (DONE, (3, 3, 3), clock.now_ms())
    async with running(tmp_path, clock) as rig:
        assert await redrive(rig, one.redrive_id) == one
        assert await rig.counts() == {"available": 4}
        back = await listed(rig, AVAILABLE, view=entry_pb2.ENTRY_VIEW_ATTEMPTS)
        assert [(entry.message_id, entry.priority) for entry in back] == [
            (4, 7), (1, 7), (3, 7), (2, 8)
        ]  # fmt: skip
        assert [entry.attempts_count for entry in back] == [0] * 4
        outcomes = [[attempt.outcome for attempt in entry.attempts] for entry in back]
        assert outcomes == [[], *[["nack: broken"]] * 3]
        # Who claims it has its first attempt, and the next failure is told behind the first.
        await fail_again(rig, 4, "again")
        for entry in await listed(rig, FAILED, view=entry_pb2.ENTRY_VIEW_ATTEMPTS):
            assert entry.attempts_count == 1
            items = [attempt.outcome for attempt in entry.attempts]
            assert items == ["nack: broken"] * (entry.message_id != 4) + ["nack: again"]


async def test_what_comes_from_another_queue_into_a_delayed_one_waits_and_is_watched() -> None:
    async with running() as rig:
        # Given dead letters of a queue, and of a delayed one
        await rig.create(max_attempts=1)
        await rig.create("audited", max_attempts=1, default_delay_ms=60_000)
        await fail(rig, [1])
        await fail(rig, [2], queue_id="audited")

        # When both are redriven into the delayed one
        await redriven(rig, target_queue_id="audited")
        await redriven(rig, queue_id="audited")

        # Then only the one that is new there waits, where auditors see it
        [waits] = await listed(rig, DELAYED, queue_id="audited")
        assert (waits.message_id, waits.visible_at_ms) == (1, rig.clock.now_ms() + 60_000)
        assert await ids(rig, AVAILABLE, queue_id="audited") == [2]
        async with watching(rig, queue_id="audited") as watch:
            assert await watch.until(1) == [1]


async def test_only_the_messages_named_move() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 1001))
        await fail(rig, range(1001, 1501))
        wanted = [1, 2, 499, 500, 501, 777, 1000, 1001, 1500]

        one = await redriven(rig, message_ids=[*wanted, 9999, 777])

        assert (one.state, progress(one)) == (DONE, (1500, 1500, len(wanted)))
        assert await ids(rig, AVAILABLE) == wanted
        assert set(await ids(rig, FAILED)) == {*range(1, 1501)} - {*wanted}
        assert await rig.counts() == {"available": len(wanted), "failed": 1500 - len(wanted)}


async def test_a_filter_sees_the_content_and_the_failure() -> None:
    clock = ManualClock()
    async with running(clock=clock) as rig:
        await rig.create(max_attempts=2)
        began_ms = clock.now_ms()
        await rig.assign(range(1, 7))
        for number in range(1, 7):
            headers = {"tier": "gold" if number % 2 else "tin"}
            rig.ingest.replaced[number] = message_pb2.Message(
                message_id=number, headers=headers, payload=b"x" * number, created_at_ms=number
            )
        await fail_again(rig, 6, "first")
        await fail_again(rig, 6, "timeout")
        # Another six fail later, and one of them is not stored any more.
        clock.advance(60_000)
        await rig.assign(range(11, 17))
        await fail_again(rig, 6, "first")
        await fail_again(rig, 6, "no such street")
        rig.ingest.gone = {13}

        async def moved(source: str) -> set[int]:
            before = set(await ids(rig, AVAILABLE))
            one = await redriven(rig, filter=source)
            assert one.state == DONE
            assert one.filter == source
            found = set(await ids(rig, AVAILABLE)) - before
            assert one.redriven_count == len(found)
            return found

        assert await moved("false") == set()
        assert await moved("headers.tier == 'gold' && size < 4") == {1, 3}
        assert await moved("reason == 'nack: timeout' && headers['tier'] == 'gold'") == {5}
        assert await moved("headers['no such'] == 'x'") == set(), "an error is no match"
        late = f"failed_at > timestamp('{_text(began_ms)}') && attempts == 2"
        assert await moved(late + " && size == 10 && reason.contains('street')") == {
            11, 12, 14, 15, 16
        }  # fmt: skip
        assert await moved("attempts > 2 || attempts < 2") == set()
        assert await moved("created_at < received_at || size > 0") == {
            2,
            4,
            6,
        }
        assert await ids(rig, FAILED) == [13], "nothing is known of it"
        rig.ingest.gone = set()
        rig.ingest.replaced.clear()
        assert await moved("true") == {13}


def _text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


async def test_dead_letters_that_fail_again_or_come_later_are_not_taken() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [1, 2, 3, 4])
        one = await start(rig, rate=10)  # one message at a time, and a tenth of a second each
        await until(rig, one.redrive_id, lambda value: value.redriven_count >= 1)
        await fail_again(rig, 1)
        await rig.assign([5], priorities=[0])  # before those that have come back meanwhile
        await fail_again(rig, 1)

        one = await ended(rig, one.redrive_id)

        assert progress(one) == (4, 4, 4)
        assert await ids(rig, FAILED) == [1, 5]
        assert await ids(rig, AVAILABLE) == [2, 3, 4]


async def test_dead_letters_past_their_retention_stay() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        deadline = rig.clock.now_ms() + 60_000
        await rig.assign([1, 2, 3], retention_deadlines_ms=[deadline, 0, deadline + 60_000])
        await fail_again(rig, 3)
        rig.clock.advance(60_000)

        one = await redriven(rig)

        assert (one.state, progress(one)) == (DONE, (3, 3, 2))
        back = await listed(rig, AVAILABLE)
        kept = [(entry.message_id, entry.retention_deadline_ms) for entry in back]
        assert kept == [(2, 0), (3, deadline + 60_000)]
        assert await ids(rig, FAILED) == [1]


async def test_dead_letters_that_are_not_listed_any_more_stay() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1, failed_retention_s=60)
        await fail(rig, [1])
        rig.clock.advance(30_000)
        await fail(rig, [2])
        rig.clock.advance(30_001)

        assert (await redriven(rig, message_ids=[1])).redriven_count == 0
        assert progress(await redriven(rig)) == (2, 2, 1)

        assert await ids(rig, AVAILABLE) == [2]
        assert await rig.counts() == {"available": 1, "failed": 1}


async def test_they_can_go_into_another_queue() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await rig.create("repaired")
        await rig.assign([1, 2], priorities=[3, 200])
        await fail_again(rig, 2)

        one = await redriven(rig, target_queue_id="repaired", message_ids=[2])

        assert (one.target_queue_id, progress(one)) == ("repaired", (2, 2, 1))
        [entry] = await listed(rig, AVAILABLE, "repaired")
        assert (entry.message_id, entry.priority, entry.attempts_count) == (2, 200, 0)
        assert await ids(rig, FAILED) == [1]
        assert [one.message.message_id for one in await rig.claim("repaired")] == [2]
        [left] = await listed(rig, queue_pb2.ENTRY_STATE_DONE)
        assert (left.message_id, left.attempts_count, left.transferred_to) == (2, 1, "repaired")
        assert await rig.counts() == {"done": 1, "failed": 1}


async def test_redrives_beside_one_another_in_the_same_rows_skip_nothing() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 301))
        # Looks at some of the row, and leaves it as it is: its filter is false.
        slow = await start(rig, filter="size < 0 || headers == {'never': 'there'}", rate=10)
        await until(rig, slow.redrive_id, lambda value: value.examined_count >= 10)
        slow = await cancelled(rig, slow.redrive_id)
        seen = slow.examined_count
        assert 10 <= seen < 300
        # Another takes what it has looked at out of the row, and some of the rest.
        await redriven(rig, message_ids=[*range(1, seen + 1, 2), 300])

        rig.ingest.reads.clear()
        await resumed(rig, slow.redrive_id)
        await until(rig, slow.redrive_id, lambda value: value.examined_count > seen)
        await cancelled(rig, slow.redrive_id)

        assert rig.ingest.reads[0] == [seen + 1], "it is at the next one, as before"


async def test_nothing_to_redrive_is_done_at_once() -> None:
    async with running() as rig:
        await rig.create()
        one = await redriven(rig)
        assert (one.state, progress(one)) == (DONE, (0, 0, 0))


# --- Cancel, resume, repeat -----------------------------------------------------


async def test_one_that_is_cancelled_stands_still_until_it_is_resumed(tmp_path: Path) -> None:
    clock = ManualClock()
    async with running(tmp_path, clock) as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 101))
        one = await start(rig, rate=20)
        await until(rig, one.redrive_id, lambda value: value.redriven_count >= 2)

        stopped = await cancelled(rig, one.redrive_id)

        assert stopped.state == CANCELLED
        assert stopped.ended_at_ms == clock.now_ms()
        count = stopped.redriven_count
        assert 2 <= count < 100
        assert await rig.counts() == {"available": count, "failed": 100 - count}
        assert await cancelled(rig, one.redrive_id) == stopped
        # Another runs to its end meanwhile: this one does not.
        await redriven(rig, message_ids=[100])
        assert await redrive(rig, one.redrive_id) == stopped
    async with running(tmp_path, clock) as rig:
        assert await redrive(rig, one.redrive_id) == stopped
        again = await resumed(rig, one.redrive_id)
        assert (again.state, again.ended_at_ms) == (RUNNING, 0)
        assert (await resumed(rig, one.redrive_id)).state == RUNNING
    async with running(tmp_path, clock) as rig:
        # It goes on after a restart without being asked.
        done = await ended(rig, one.redrive_id)
        assert (done.state, progress(done)) == (DONE, (100, 99, 99))
        assert sorted(await ids(rig, AVAILABLE)) == [*range(1, 101)]
        for call in (cancelled, resumed):
            code, reason, _ = await refusal(call(rig, one.redrive_id))
            assert (code, reason) == (grpc.StatusCode.FAILED_PRECONDITION, "REDRIVE_DONE")


async def test_a_repeated_request_gives_the_same_redrive(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.create(max_attempts=1)
        await rig.create("other")
        await fail(rig, [1])
        one = await redriven(rig, request_id="r", target_queue_id="other")
        await fail(rig, [2])
    async with running(tmp_path) as rig:
        await delete(rig, "other")
        assert await start(rig, request_id="r", target_queue_id="other") == one
        assert await ids(rig, FAILED) == [2]
        another = await redriven(rig, request_id="s")
        assert another.redrive_id != one.redrive_id
        assert another.redriven_count == 1
        without = [await redriven(rig) for _ in range(2)]
        assert without[0].redrive_id != without[1].redrive_id


async def test_an_ingest_that_is_down_is_waited_for() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, [1, 2])
        rig.ingest.down = True
        reads = len(rig.ingest.reads)
        one = await start(rig, filter="size == 10")
        # One that needs no content is not held up.
        await rig.create("p", max_attempts=1)
        rig.ingest.down = False
        await fail(rig, [3], queue_id="p")
        rig.ingest.down = True
        assert (await redriven(rig, "p")).redriven_count == 1
        await until(rig, one.redrive_id, lambda _: len(rig.ingest.reads) > reads)
        rig.ingest.down = False
        one = await ended(rig, one.redrive_id)
        assert (one.state, progress(one)) == (DONE, (2, 2, 2))


# --- What else happens meanwhile --------------------------------------------------


async def test_a_purge_of_the_dead_letters_leaves_nothing_to_do() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await rig.create("target")
        await fail(rig, range(1, 51))
        one = await start(rig, rate=10, target_queue_id="target")
        result = await until(rig, one.redrive_id, lambda value: value.redriven_count >= 1)
        await rig.queues.PurgeQueue(queue_pb2.PurgeQueueRequest(queue_id="q", states=[FAILED]))
        await fail(rig, [99])
        result = await ended(rig, one.redrive_id)
        assert result.state == DONE
        assert await ids(rig, FAILED) == [99]
        assert result.redriven_count == len(await ids(rig, AVAILABLE, queue_id="target"))


async def test_one_whose_queue_is_deleted_ends_and_cannot_be_resumed() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await fail(rig, range(1, 51))
        one = await start(rig, rate=10)
        await delete(rig)
        result = await ended(rig, one.redrive_id)
        assert (result.state, result.error) == (BROKEN_OFF, "its queue was deleted")
        assert (await refusal(resumed(rig, one.redrive_id)))[0] == NOT_FOUND
        # One of the same name is another queue.
        await created_again(rig, max_attempts=1)
        await fail(rig, [99])
        assert (await refusal(resumed(rig, one.redrive_id)))[0] == NOT_FOUND
        assert await ids(rig, FAILED) == [99]


async def created_again(rig: Rig, queue_id: str = "q", **settings: Any) -> None:
    """Creates a queue whose former one is still being swept away."""
    async with asyncio.timeout(60):
        while True:
            try:
                await rig.create(queue_id, **settings)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
                await asyncio.sleep(0.01)
            else:
                return


async def test_one_whose_target_is_deleted_goes_on_when_that_is_there_again() -> None:
    async with running() as rig:
        await rig.create(max_attempts=1)
        await rig.create("target")
        await fail(rig, range(1, 21))
        one = await start(rig, target_queue_id="target", rate=10)
        await until(rig, one.redrive_id, lambda value: value.redriven_count >= 1)
        await delete(rig, "target")
        result = await ended(rig, one.redrive_id)
        assert (result.state, result.error) == (
            BROKEN_OFF,
            "queue 'target' does not exist any more",
        )
        left = 20 - result.redriven_count
        assert len(await ids(rig, FAILED)) == left > 0
        await redriven(rig, message_ids=[20])
        await created_again(rig, "target")
        await resumed(rig, one.redrive_id)
        result = await ended(rig, one.redrive_id)
        assert (result.state, result.error, result.redriven_count) == (DONE, "", 19)
        assert len(await ids(rig, AVAILABLE, queue_id="target")) == left - 1
        assert await ids(rig, FAILED) == []
