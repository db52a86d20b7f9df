"""Publishes that were accepted as tasks, and their outcomes.

Where event queues have the consistency `async`, a publish is answered when the queue backend has
it: its messages get their IDs when the task is applied.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, Final, TypeVar

from slatemq._admin.task_ids import parse_task_id
from slatemq._checks import check_text, check_whole
from slatemq._publish.published import Published, published
from slatemq._requests import fields_of, message_of
from slatemq._rpc.peers import Method
from slatemq._rpc.queue_locations import Calls
from slatemq.errors import DeadlineExceeded, SlateMQError
from slatemq.models import Duration, seconds
from slatemq.v1 import task_pb2
from slatemq.v1.task_pb2_grpc import TaskServiceStub

Q = TypeVar("Q")
R = TypeVar("R")

WAIT_S: Final = 30.0
"""The wait of one call; a longer wait takes several calls."""

LOOK_S: Final = 1.0
"""How long an answer is waited for however short the wait is to be."""


class TaskState(Enum):
    """FAILED: permanently; `retry_failed_tasks` tries it again."""

    PENDING = "pending"
    APPLIED = "applied"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Task:
    """A publish that was accepted as a task.

    Attributes:
        ended_at_ms: The time when it was applied or failed permanently; 0 = neither.
        published: The messages of an applied task, in the order of the request.
        error: The error of the last failed attempt; of a pending task only where it is known.
        attempts_count: Failed attempts, where `error` is known, or the task was listed.
    """

    task_id: str
    state: TaskState
    accepted_at_ms: int
    ended_at_ms: int = 0
    published: tuple[Published, ...] = ()
    error: str = ""
    attempts_count: int = 0


class TaskCalls(Calls):
    """Reading tasks, waiting for them, and retrying those that failed; a part of the client."""

    async def get_task(self, task_id: str) -> Task:
        """The task as it is now. Raises NotFound for one forgotten after a week."""
        shard = _shard_of(task_id)
        request = task_pb2.GetTaskRequest(task_id=task_id)
        response = await self._peers.ask_ingest(
            shard, lambda channel: TaskServiceStub(channel).GetTask, request
        )
        return _task_of(response.task)

    async def wait_task(self, task_id: str, timeout: Duration | None = None) -> Task:
        """Waits until a task is applied or has failed, for at most `timeout`; returns the task.

        None waits without a limit. A task is pending while its ingest still retries it. Raises as
        `get_task`, and where the ingest has not answered by then, what failed last: it has at least
        a second for that.
        """
        shard = _shard_of(task_id)
        request = task_pb2.WaitTaskRequest(task_id=task_id)
        length_s = inf if timeout is None else seconds(timeout, "timeout")
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        task: Task | None = None
        failures: list[SlateMQError] = []
        try:
            async with _ending(began_s + length_s):
                while task is None or task.state is TaskState.PENDING:
                    # The ingest answers shortly before the deadline of the call.
                    attempt_s = min(WAIT_S, began_s + length_s - loop.time())
                    response = await self._peers.ask_ingest(
                        shard,
                        lambda channel: TaskServiceStub(channel).WaitTask,
                        request,
                        attempt_s=attempt_s,
                        wait_s=attempt_s,
                        on_failure=failures.append,
                    )
                    task = _task_of(response.task)
                return task
        except TimeoutError:
            if task is not None:
                return task
        try:
            async with _ending(began_s + max(length_s, LOOK_S)):
                return await self.get_task(task_id)
        except TimeoutError:
            if failures:
                raise failures[-1] from None
            raise DeadlineExceeded(
                f"ingest {shard} did not answer in {max(length_s, LOOK_S):g} s"
            ) from None

    async def failed_tasks(self, limit: int = 100) -> AsyncIterator[Task]:
        """The tasks that failed permanently, the oldest of each ingest first.

        At most `limit` of each ingest. An item of the backend that is not a task has an empty ID,
        and an error that names its place. When an ingest does not answer, its error is raised after
        the tasks of the others. FailedPrecondition (DIRECT_MODE): the ingest accepts no tasks.
        """
        check_whole("limit", limit, 1)
        async for task in self._list(
            lambda channel: TaskServiceStub(channel).ListFailedTasks,
            message_of(task_pb2.ListFailedTasksRequest, limit=limit),
        ):
            yield task

    async def pending_tasks(self, limit: int = 100) -> AsyncIterator[Task]:
        """The tasks that wait to be applied, the oldest of each ingest first.

        At most `limit` of each ingest, and as far as its backend shows them (`ListPendingTasks`).
        Errors are as those of `failed_tasks`.
        """
        check_whole("limit", limit, 1)
        async for task in self._list(
            lambda channel: TaskServiceStub(channel).ListPendingTasks,
            message_of(task_pb2.ListPendingTasksRequest, limit=limit),
        ):
            yield task

    async def _list(self, method: Method[Q, Any], request: Q) -> AsyncIterator[Task]:
        """The tasks in the responses of all ingests; then raises the first error."""
        answers = await self._ask_ingests(method, request)
        for answer in answers:
            if not isinstance(answer, SlateMQError):
                for task in answer.tasks:
                    yield _task_of(task)
        _raise_first(answers)

    async def retry_failed_tasks(self) -> int:
        """Retries every task that failed permanently; returns how many.

        Ingests go on with it where this ends before; the next call gets the number of those, too.
        Raises as `failed_tasks`, after the other ingests have done it: `metadata["retried_count"]`
        of the error has their number. Safe to repeat.
        """
        answers = await self._ask_ingests(
            lambda channel: TaskServiceStub(channel).RetryFailedTasks,
            task_pb2.RetryFailedTasksRequest(),
        )
        count = sum(
            answer.retried_count for answer in answers if not isinstance(answer, SlateMQError)
        )
        try:
            _raise_first(answers)
        except SlateMQError as error:
            error.metadata["retried_count"] = str(count)
            raise
        return count

    async def _ask_ingests(self, method: Method[Q, R], request: Q) -> list[R | SlateMQError]:
        """The responses of all ingests, or their errors."""

        async def one(shard: int) -> R | SlateMQError:
            try:
                return await self._peers.ask_ingest(shard, method, request)
            except SlateMQError as error:
                return error

        return await asyncio.gather(*map(one, sorted((await self._peers.topology()).ingests)))


def _shard_of(task_id: str) -> int:
    check_text("task_id", task_id)
    return parse_task_id(task_id).shard


def _ending(at_s: float) -> asyncio.Timeout:
    """Raises TimeoutError at this time of the loop; never where it is infinite."""
    return asyncio.timeout_at(None if at_s == inf else at_s)


def _raise_first(answers: Iterable[object]) -> None:
    for answer in answers:
        if isinstance(answer, SlateMQError):
            raise answer


def _task_of(task: task_pb2.Task) -> Task:
    state = task_pb2.TaskState.Name(task.state).removeprefix("TASK_STATE_").lower()
    messages = published(task.message_ids, task.received_at_ms, task.duplicates)
    return Task(**fields_of(task, Task), state=TaskState(state), published=tuple(messages))
