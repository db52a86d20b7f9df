"""TaskService: the outcomes of publishes that were accepted as tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from libs.access.current import caller_quota
from libs.serving.requests.shares import Shares
from libs.storage.records.task_records import AppliedTask, FailedTaskRecord
from services.ingest.write.request_ids import answered_of
from slatemq.errors import FailedPrecondition, InvalidArgument
from slatemq.v1 import task_pb2, task_pb2_grpc

if TYPE_CHECKING:
    from services.ingest.tasks.outcomes import KnownTask
    from services.ingest.tasks.queued import Tasks

FAILED_MAX: Final = 10_000
PENDING_MAX: Final = 1_000
"""Each is read with its body, and looked up in the store."""

LISTED_DEFAULT: Final = 100

ANSWER_S: Final = 1.0
"""A call that waits is answered this long before its deadline."""

WAIT_S_MAX: Final = 60.0
"""The longest wait of a call, as of a claim; it may be for a task that there is not."""

WAITING_MAX: Final = 5_000
"""Calls that wait at once: half of those that a process serves, so that others have room. One
principal has half of these."""


class TaskServicer(task_pb2_grpc.TaskServiceServicer):
    def __init__(self, tasks: Tasks | None) -> None:
        """`tasks` is None in direct mode."""
        self._ledger = tasks
        self._waits = Shares(
            "waiting_tasks",
            WAITING_MAX,
            "calls that wait for tasks",
            ("TOO_MANY_WAITING_TASKS", f"{WAITING_MAX} calls wait for tasks"),
            for_services=True,
        )

    async def GetTask(
        self, request: task_pb2.GetTaskRequest, context: Any
    ) -> task_pb2.GetTaskResponse:
        return task_pb2.GetTaskResponse(task=_task_of(await self._tasks.get(request.task_id)))

    async def WaitTask(
        self, request: task_pb2.WaitTaskRequest, context: Any
    ) -> task_pb2.WaitTaskResponse:
        tasks, left_s = self._tasks, seconds_to_wait(context)
        wait_s = WAIT_S_MAX if left_s is None else min(left_s, WAIT_S_MAX)
        with self._waits.place(caller_quota()):
            known = await tasks.wait(request.task_id, wait_s)
        return task_pb2.WaitTaskResponse(task=_task_of(known))

    async def ListFailedTasks(
        self, request: task_pb2.ListFailedTasksRequest, context: Any
    ) -> task_pb2.ListFailedTasksResponse:
        _check_limit(request.limit, FAILED_MAX)
        found = await self._tasks.failed(request.limit or LISTED_DEFAULT)
        return task_pb2.ListFailedTasksResponse(tasks=map(_task_of, found))

    async def ListPendingTasks(
        self, request: task_pb2.ListPendingTasksRequest, context: Any
    ) -> task_pb2.ListPendingTasksResponse:
        _check_limit(request.limit, PENDING_MAX)
        found = await self._tasks.pending(request.limit or LISTED_DEFAULT)
        return task_pb2.ListPendingTasksResponse(tasks=map(_task_of, found))

    async def RetryFailedTasks(
        self, request: task_pb2.RetryFailedTasksRequest, context: Any
    ) -> task_pb2.RetryFailedTasksResponse:
        return task_pb2.RetryFailedTasksResponse(retried_count=await self._tasks.retry_failed())

    @property
    def _tasks(self) -> Tasks:
        if self._ledger is None:
            raise FailedPrecondition(
                "DIRECT_MODE", "this ingest stores publishes directly: it has no tasks"
            )
        return self._ledger


def _check_limit(limit: int, highest: int) -> None:
    if not 0 <= limit <= highest:
        raise InvalidArgument("limit", f"must be 0 to {highest}, not {limit}")


def seconds_to_wait(context: Any) -> float | None:
    """How long a call may wait; None: it has no deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else wait_within(remaining)


def wait_within(remaining_s: float) -> float:
    """How long to wait where the answer is due in this time."""
    return max(0.0, remaining_s - min(ANSWER_S, remaining_s / 5))


def _task_of(known: KnownTask) -> task_pb2.Task:
    task = task_pb2.Task(task_id=known.task_id, accepted_at_ms=known.accepted_at_ms)
    outcome = known.outcome
    if isinstance(outcome, AppliedTask):
        task.state = task_pb2.TASK_STATE_APPLIED
        task.ended_at_ms = outcome.at_ms
        task.message_ids.extend(answered_of(outcome).message_ids)
        task.duplicates.extend(place for place, _ in outcome.duplicates)
        task.received_at_ms = outcome.received_at_ms
    elif isinstance(outcome, FailedTaskRecord):
        task.state = task_pb2.TASK_STATE_FAILED
        task.ended_at_ms = outcome.at_ms
        task.error, task.attempts_count = outcome.error, outcome.attempts
    else:
        task.state = task_pb2.TASK_STATE_PENDING
        task.error, task.attempts_count = known.error, known.attempts
    return task
