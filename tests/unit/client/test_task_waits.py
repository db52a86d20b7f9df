"""A wait for a task, whose calls an ingest answers shortly before their deadlines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from slatemq._admin.task_ids import TaskIds
from slatemq._admin.tasks import TaskCalls, TaskState
from slatemq.errors import DeadlineExceeded
from slatemq.v1 import task_pb2

WAY_S = 0.02
"""How long an answer is on its way."""


class PendingTask(TaskCalls):
    """Calls to an ingest that applies nothing."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(peers=None))  # type: ignore[arg-type]

    async def _ask_ingest(
        self, shard: int, method: Any, request: Any, attempt_s: float = 10, **_: Any
    ) -> Any:
        task = task_pb2.Task(task_id=request.task_id, state=task_pb2.TASK_STATE_PENDING)
        if isinstance(request, task_pb2.GetTaskRequest):
            return task_pb2.GetTaskResponse(task=task)
        await asyncio.sleep(0.8 * attempt_s)
        if 0.2 * attempt_s < WAY_S:
            raise DeadlineExceeded("the answer was on its way")
        return task_pb2.WaitTaskResponse(task=task)


@pytest.mark.parametrize("timeout_s", [0.0, 0.1, 0.5])
async def test_a_wait_for_a_task_that_stays_pending_ends_with_it(timeout_s: float) -> None:
    task_id = TaskIds(0).make(1_700_000_000_000)
    loop = asyncio.get_running_loop()
    began_at = loop.time()

    task = await PendingTask().wait_task(task_id, timeout_s)

    assert (task.task_id, task.state) == (task_id, TaskState.PENDING)
    assert loop.time() - began_at >= timeout_s
