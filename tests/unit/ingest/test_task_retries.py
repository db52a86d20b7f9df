"""What a call that retries dead letters gets, and what goes on without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import cast

import pytest

from libs.events.tasks import Moving
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.outcomes import Attempt, TaskOutcomes
from services.ingest.tasks.retries import Retries
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from tests.unit.ingest.shards import opened


class SlowBackend:
    """A backend that moves dead letters back, one after another, each when the test says so."""

    def __init__(self, *dead: str) -> None:
        self.dead = list(dead)
        self.turns = asyncio.Semaphore(0)
        self.calls_count = 0
        self.error: Exception | None = None

    @property
    def connected(self) -> SlowBackend:
        return self

    async def retry_failed_tasks(self, moving: Moving) -> int:
        self.calls_count += 1
        count = 0
        while self.dead:
            with moving([self.dead[0]]):
                await self.turns.acquire()
                if self.error is not None:
                    raise self.error
                del self.dead[0]
            count += 1
        return count

    def move(self, count: int) -> None:
        for _ in range(count):
            self.turns.release()

    async def until_left(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.dead) > count:
                await asyncio.sleep(0)


@asynccontextmanager
async def failed_tasks(count: int) -> AsyncIterator[tuple[TaskOutcomes, SlowBackend, Retries]]:
    """Tasks that have failed, in the order of their dead letters."""
    async with opened() as shard:
        outcomes, ids = TaskOutcomes(shard.database, shard.publisher, shard.clock), TaskIds(0)
        backend = SlowBackend(*(ids.make(shard.clock.now_ms()) for _ in range(count)))
        for task_id in backend.dead:
            outcomes.settle(task_id, await outcomes.fail(task_id, Attempt(1, "refused")))
        retries = Retries(cast("TaskBackend", backend), outcomes)
        try:
            yield outcomes, backend, retries
        finally:
            await retries.close()


async def test_a_retry_goes_on_without_its_call_and_a_repeat_gets_its_whole_count() -> None:
    async with failed_tasks(5) as (_, backend, retries):
        # Given a call that ends when some dead letters are moved
        first = asyncio.create_task(retries.retry())
        backend.move(2)
        await backend.until_left(3)
        first.cancel()
        await asyncio.wait([first])

        # When it is repeated, by two, before all are moved
        repeats = [asyncio.create_task(retries.retry()) for _ in range(2)]
        await asyncio.sleep(0)
        backend.move(3)

        # Then both get the count of all, which were moved once
        assert await asyncio.gather(*repeats) == [5, 5]
        assert backend.calls_count == 1


async def test_a_repeat_that_comes_after_the_end_gets_the_count_that_no_call_got() -> None:
    async with failed_tasks(3) as (_, backend, retries):
        first = asyncio.create_task(retries.retry())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.wait([first])
        backend.move(3)
        await backend.until_left(0)
        assert await retries.retry() == 3
        assert await retries.retry() == 0


async def test_a_task_is_pending_from_its_move_on_and_one_that_was_not_moved_has_failed() -> None:
    async with failed_tasks(3) as (outcomes, backend, retries):
        moved, failing, left = list(backend.dead)

        # Given a backend that goes down when one of three dead letters is moved
        first = asyncio.create_task(retries.retry())
        backend.move(1)
        await backend.until_left(2)
        assert [outcomes.is_failing(one) for one in (moved, failing, left)] == [True, True, False]
        backend.error = Unavailable("the backend went down", reason="BACKEND_DOWN")
        backend.move(1)
        with pytest.raises(Unavailable):
            await first

        # Then that one alone is pending, until it is given out and has an outcome
        assert [outcomes.is_failing(one) for one in (moved, failing, left)] == [True, False, False]
        outcomes.begin_again(moved)
        outcomes.settle(moved, await outcomes.fail(moved, Attempt(1, "refused")))
        assert not outcomes.is_failing(moved)

        # And the others can be retried
        backend.error = None
        backend.move(2)
        assert await retries.retry() == 2
