"""Publishes that were accepted as tasks: what became of them; a part of the client.

Where event queues have the consistency `async`, a publish is answered when the queue backend has
it: its messages get their IDs when the task is applied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from slatemq._admin.task_ids import parse_task_id
from slatemq._checks import check_text, check_whole
from slatemq._publish.published import Published, published
from slatemq._rpc.peers import Peers
from slatemq.errors import SlateMQError
from slatemq.models import Duration, seconds
from slatemq.v1 import task_pb2, task_pb2_grpc

__all__ = ["Task", "TaskCalls", "TaskState"]

WAIT_S: Final = 30.0
"""How long one call waits; a wait for longer is several."""


class TaskState(Enum):
    """Where a task is."""

    PENDING = "pending"
    APPLIED = "applied"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Task:
    """A publish that was accepted as a task.

    Attributes:
        ended_at_ms: When it was applied, or failed for the last time; 0 = neither.
        published: Of an applied task its messages, in the order of the request.
        error: Of the last attempt that failed; of a pending task only where it is known.
        attempts_count: How many attempts have failed, as far as `error` is known.
    """

    task_id: str
    state: TaskState
    accepted_at_ms: int
    ended_at_ms: int = 0
    published: tuple[Published, ...] = ()
    error: str = ""
    attempts_count: int = 0


class TaskCalls:
    """Looking at tasks, waiting for them, and retrying those that failed; a part of the client."""

    _peers: Peers

    async def get_task(self, task_id: str) -> Task:
        """What became of a task. Raises NotFound for one accepted over seven days ago."""
        return await self._about_task(task_id, "GetTask", task_pb2.GetTaskRequest)

    async def wait_task(self, task_id: str, timeout: Duration | None = None) -> Task:
        """The same once it is applied or has failed, or as it is after `timeout`.

        None waits for as long as it takes. A pending task is tried again until it has failed for
        the last time. Raises as `get_task`.
        """
        until = None if timeout is None else time.monotonic() + seconds(timeout, "timeout")
        while True:
            left = WAIT_S if until is None else until - time.monotonic()
            if left <= 0:
                return await self.get_task(task_id)
            task = await self._about_task(
                task_id, "WaitTask", task_pb2.WaitTaskRequest, attempt_s=min(left, WAIT_S)
            )
            if task.state is not TaskState.PENDING:
                return task

    async def failed_tasks(self, limit: int = 100) -> AsyncIterator[Task]:
        """The tasks that failed for the last time, the oldest of each ingest first.

        At most `limit` of each ingest; what lies there and is no task has an empty ID, and an error
        that names its place. When one does not answer, those of the others come first,
        then its error is raised. FailedPrecondition (DIRECT_MODE): publishes are no tasks there.
        """
        check_whole("limit", limit, 1)
        answers = await self._ask_all(
            "ListFailedTasks", task_pb2.ListFailedTasksRequest(limit=limit)
        )
        for answer in answers:
            if not isinstance(answer, SlateMQError):
                for task in answer.tasks:
                    yield _task_of(task)
        _raise_first(answers)

    async def retry_failed_tasks(self) -> int:
        """Tries every task again that failed for the last time; gives how many.

        Raises as `failed_tasks`, after the other ingests have done it; repeat it safely.
        """
        answers = await self._ask_all("RetryFailedTasks", task_pb2.RetryFailedTasksRequest())
        _raise_first(answers)
        return sum(answer.retried_count for answer in answers)

    async def _about_task(
        self, task_id: str, method: str, request_type: Any, **options: float
    ) -> Task:
        check_text("task_id", task_id)
        shard = parse_task_id(task_id).shard
        answer = await self._ask_ingest(shard, method, request_type(task_id=task_id), **options)
        return _task_of(answer.task)

    async def _ask_all(self, method: str, request: Any) -> list[Any]:
        """The answers of all ingests, or their errors."""
        shards = await self._peers.ingest_shards()
        asked = (self._ask_ingest(shard, method, request) for shard in shards)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, SlateMQError):
                raise answer
        return list(answers)

    async def _ask_ingest(self, shard: int, method: str, request: Any, **options: float) -> Any:
        async def attempt(timeout: float) -> Any:
            stub = task_pb2_grpc.TaskServiceStub(await self._peers.ingest(shard))
            return await getattr(stub, method)(request, timeout=timeout)

        return await self._peers.call(attempt, **options)  # type: ignore[arg-type]


def _raise_first(answers: list[Any]) -> None:
    for answer in answers:
        if isinstance(answer, SlateMQError):
            raise answer


def _task_of(task: task_pb2.Task) -> Task:
    state = task_pb2.TaskState.Name(task.state).removeprefix("TASK_STATE_").lower()
    return Task(
        task_id=task.task_id,
        state=TaskState(state),
        accepted_at_ms=task.accepted_at_ms,
        ended_at_ms=task.ended_at_ms,
        published=tuple(published(task.message_ids, task.received_at_ms, task.duplicates)),
        error=task.error,
        attempts_count=task.attempts_count,
    )
