"""A wait for a task, whose calls an ingest answers shortly before their deadlines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slatemq._admin.task_ids import TaskIds
from slatemq._admin.tasks import TaskCalls, TaskState
from slatemq.errors import DeadlineExceeded, SlateMQError, Unavailable
from slatemq.v1 import task_pb2

TASK_ID = TaskIds(0).make(1_700_000_000_000)


class Ingest:
    """An ingest that has applied the task, or does not apply it, or answers no call."""

    def __init__(
        self,
        *,
        is_applied: bool = False,
        is_silent: bool = False,
        failure: SlateMQError | None = None,
    ) -> None:
        """`failure` is what each try of its calls fails with, where it is silent."""
        self.asked: list[Any] = []
        self._is_applied = is_applied
        self._is_silent = is_silent
        self._failure = failure
        locations: Any = SimpleNamespace(peers=self)
        self.tasks = TaskCalls(locations)

    async def ask_ingest(
        self,
        shard: int,
        method: Any,
        request: Any,
        attempt_s: float = 10,
        on_failure: Any = None,
        **_: Any,
    ) -> Any:
        self.asked.append(type(request))
        if self._is_silent:
            if self._failure is not None and on_failure is not None:
                on_failure(self._failure)
            await asyncio.Event().wait()
        state = task_pb2.TASK_STATE_APPLIED if self._is_applied else task_pb2.TASK_STATE_PENDING
        task = task_pb2.Task(task_id=request.task_id, state=state)
        if isinstance(request, task_pb2.GetTaskRequest):
            return task_pb2.GetTaskResponse(task=task)
        if not self._is_applied:
            await asyncio.sleep(0.8 * attempt_s)
        return task_pb2.WaitTaskResponse(task=task)


@pytest.mark.parametrize("timeout_s", [0.0, 0.1, 0.5])
async def test_a_wait_for_a_task_that_stays_pending_ends_with_it(timeout_s: float) -> None:
    ingest = Ingest(is_applied=False)
    loop = asyncio.get_running_loop()
    began_at = loop.time()

    task = await ingest.tasks.wait_task(TASK_ID, timeout_s)

    assert (task.task_id, task.state) == (TASK_ID, TaskState.PENDING)
    assert loop.time() - began_at >= timeout_s


async def test_a_wait_for_a_task_that_was_applied_is_one_call() -> None:
    ingest = Ingest(is_applied=True)

    task = await ingest.tasks.wait_task(TASK_ID, 0.1)

    assert task.state is TaskState.APPLIED
    assert ingest.asked == [task_pb2.WaitTaskRequest]


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (None, DeadlineExceeded, "ingest 0 did not answer"),
        (Unavailable("no ingest 0 is known"), Unavailable, "no ingest 0 is known"),
    ],
)
@pytest.mark.parametrize("timeout_s", [0.0, 1.2])
async def test_a_wait_ends_with_its_time_also_where_the_ingest_does_not_answer(
    timeout_s: float, failure: SlateMQError | None, kind: type[SlateMQError], text: str
) -> None:
    ingest = Ingest(is_silent=True, failure=failure)

    with pytest.raises(kind, match=text):
        await ingest.tasks.wait_task(TASK_ID, timeout_s)
