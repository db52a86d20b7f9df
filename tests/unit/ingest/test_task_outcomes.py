"""What is known of tasks: with their messages, and for how long."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from libs.storage.database.roots import open_root
from libs.storage.records.task_records import AppliedTask, FailedTaskRecord, TaskRecord, WaitingTask
from services.ingest.shard import Shard
from services.ingest.tasks import outcomes as outcomes_module
from services.ingest.tasks.outcomes import (
    KEPT_MS,
    Attempt,
    TaskOutcomes,
    TaskWaiting,
)
from slatemq._admin.task_ids import TaskIds
from tests.manual_clock import ManualClock
from tests.unit.ingest.shards import batch, opened

START_MS = 1_771_761_600_000


def outcomes_of(shard: Shard) -> TaskOutcomes:
    return TaskOutcomes(shard.database, shard.publisher, shard.clock)


async def apply(
    shard: Shard, outcomes: TaskOutcomes, task_id: str, before: TaskRecord | None = None
) -> None:
    waiting = TaskWaiting(batch(b"x"), task_id, outcomes, before)
    answered = await shard.publisher.publish_waiting(waiting)
    assert waiting.outcome is not None
    assert waiting.outcome.first_message_id == answered.first_message_id


async def test_an_outcome_is_in_the_batch_of_its_messages() -> None:
    # Given a shard that notes each key of a commit
    async with opened(clock=ManualClock(START_MS)) as shard:
        outcomes = outcomes_of(shard)
        task_id = TaskIds(0).make(START_MS)
        numbers: list[int] = []
        shard.publisher.commits.on_durable(numbers.append)

        # When a task is applied, then its messages and its outcome came with one commit
        await apply(shard, outcomes, task_id)
        assert len(numbers) == 1
        found = await outcomes.find(task_id)
        assert found is not None
        assert found.at_ms == START_MS


async def test_a_task_that_was_accepted_here_is_looked_up_from_its_second_delivery_on() -> None:
    async with opened(clock=ManualClock(START_MS)) as shard:
        outcomes, ids = outcomes_of(shard), TaskIds(0)
        task_id, other = ids.make(START_MS), ids.make(START_MS)
        # Given a task that is applied, as another process might have left it
        await apply(shard, outcomes, other)
        assert isinstance(await outcomes.find_first(other), AppliedTask)

        # When a new one comes the first time, then nothing is known of it; afterwards it is
        outcomes.begin_new(task_id)
        assert await outcomes.find_first(task_id) is None
        await apply(shard, outcomes, task_id)
        assert isinstance(await outcomes.find_first(task_id), AppliedTask)


async def test_records_go_after_seven_days_and_never_before() -> None:
    clock = ManualClock(START_MS)
    async with opened(clock=clock) as shard:
        outcomes, ids = outcomes_of(shard), TaskIds(0)
        # Given a task that waited long, and others
        late = ids.make(START_MS - 10 * KEPT_MS)
        first, second = ids.make(START_MS), ids.make(START_MS)
        await apply(shard, outcomes, first)
        await apply(shard, outcomes, second)
        clock.advance(1000)
        await apply(shard, outcomes, late)

        # When almost seven days are over, then all is known; and after that what came later
        clock.advance(KEPT_MS - 1000)
        assert await outcomes.sweep(clock.now_ms()) == 0
        clock.advance(1)
        assert await outcomes.sweep(clock.now_ms()) == 2
        assert [await outcomes.find(one) is None for one in (late, first, second)] == [
            False,
            True,
            True,
        ]
        # And the last one, which stands before those that are gone
        clock.advance(1000)
        assert await outcomes.sweep(clock.now_ms()) == 1
        assert await outcomes.find(late) is None
        assert await outcomes.sweep(clock.now_ms()) == 0


async def test_records_of_tasks_that_may_come_again_stay() -> None:
    clock = ManualClock(START_MS)
    async with opened(clock=clock) as shard:
        outcomes, ids = outcomes_of(shard), TaskIds(0)
        applied, failed, retried, large = (ids.make(START_MS) for _ in range(4))
        # Given tasks that are applied, a dead letter, one of which a dead letter may be left,
        # and one whose body is an object, which waits
        await apply(shard, outcomes, applied)
        for task_id in (failed, retried):
            await outcomes.fail(task_id, Attempt(4, "no room"))
        await apply(shard, outcomes, retried, await outcomes.find(retried))
        outcomes.begin_new(large)
        await outcomes.keep(large, asyncio.sleep(0))
        clock.advance(2 * KEPT_MS)

        # When nothing is known of what the backend has finished, then all stay
        for finished_ms in (0, START_MS + KEPT_MS):
            assert await outcomes.sweep(finished_ms) == 0

        # And otherwise those that have failed, or wait
        assert await outcomes.sweep(START_MS + KEPT_MS + 1) == 1
        assert await outcomes.sweep(clock.now_ms()) == 0
        found = [await outcomes.find(one) for one in (applied, failed, retried, large)]
        assert found[0] is None
        assert isinstance(found[1], FailedTaskRecord)
        assert isinstance(found[2], AppliedTask)
        assert found[2].has_failed
        assert found[3] == WaitingTask(START_MS, has_failed=False)


async def test_a_task_that_ends_before_it_is_kept_stays_what_it_is() -> None:
    async with opened(clock=ManualClock(START_MS)) as shard:
        outcomes, ids = outcomes_of(shard), TaskIds(0)
        applied, failed = ids.make(START_MS), ids.make(START_MS)
        for task_id in (applied, failed):
            outcomes.begin_new(task_id)
        await outcomes.keep(applied, apply(shard, outcomes, applied))
        await outcomes.keep(failed, outcomes.fail(failed, Attempt(1, "no room")))
        assert isinstance(await outcomes.find(applied), AppliedTask)
        assert isinstance(await outcomes.find(failed), FailedTaskRecord)


async def test_a_sweep_goes_on_where_the_one_before_ended() -> None:
    clock = ManualClock(START_MS)
    async with opened(clock=clock) as shard:
        outcomes, ids = outcomes_of(shard), TaskIds(0)
        for _ in range(3):
            await apply(shard, outcomes, ids.make(clock.now_ms()))
            clock.advance(KEPT_MS + 1)
            assert await outcomes.sweep(clock.now_ms()) == 1


async def test_what_failed_is_pending_from_when_it_is_retried_and_its_record_stays() -> None:
    async with opened(open_root("memory:///"), ManualClock(START_MS)) as shard:
        outcomes, task_id = outcomes_of(shard), TaskIds(0).make(START_MS)
        waiting = outcomes.wait(task_id)
        failed = await outcomes.fail(task_id, Attempt(4, "ü" * 100_000))
        assert failed == await outcomes.find(task_id)

        # Those who wait get to know it with its dead letter
        assert outcomes.is_failing(task_id)
        outcomes.settle(task_id, failed)
        assert not outcomes.is_failing(task_id)
        assert await waiting == failed

        # When its dead letter is moved back, then it is pending until it is given out and ends
        with outcomes.moving_back([task_id, "task_01KJ2KH1G0J9FEYRWH6ATYF8WE"]):
            assert outcomes.is_failing(task_id)
        assert outcomes.is_failing(task_id)

        # And for a process that has replaced this one it has failed until then
        assert await outcomes_of(shard).find(task_id) == failed
        assert not outcomes_of(shard).is_failing(task_id)
        await apply(shard, outcomes, task_id, failed)
        applied = await outcomes.find(task_id)
        assert isinstance(applied, AppliedTask)
        assert applied.has_failed
        outcomes.settle(task_id, applied)
        assert not outcomes.is_failing(task_id)


async def test_of_more_retried_tasks_than_are_noted_the_first_are_called_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outcomes_module, "RETRIED_MAX", 2)
    async with opened(clock=ManualClock(START_MS)) as shard:
        outcomes, ids = outcomes_of(shard), TaskIds(0)
        retried = [ids.make(START_MS) for _ in range(3)]
        with outcomes.moving_back(retried):
            pass
        assert [outcomes.is_failing(one) for one in retried] == [False, True, True]


def test_a_direct_ingest_loads_nothing_of_event_queues() -> None:
    program = (
        "import sys, services.ingest.service; "
        "ours = ('libs.events', 'services.ingest.tasks.queued', 'msgspec', 'redis'); "
        "print([name for name in sys.modules if name.startswith(ours)])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]", ended.stderr
