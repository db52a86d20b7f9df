"""Event queues: what each process publishes, and publishes that were accepted as tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from services.console.clients import gathered
from services.console.rendering import client_of, done, field_of, render
from slatemq._admin.tasks import Task
from slatemq._counts import counted
from slatemq.errors import FailedPrecondition, Unauthenticated

TASKS_SHOWN: Final = 100
"""Of each ingest."""


async def show_events(request: Request) -> Response:
    client = await client_of(request)
    # Together: each of them waits for processes that do not answer.
    statuses, (failed, problem), (pending, pending_problem) = await asyncio.gather(
        client.events_status(),
        _tasks(client.failed_tasks(TASKS_SHOWN)),
        _tasks(client.pending_tasks(TASKS_SHOWN)),
    )
    task_id = field_of(request, "task").strip()
    found = await client.get_task(task_id) if task_id else None
    return render(
        request,
        "events.html",
        statuses=statuses,
        failed=failed,
        pending=pending,
        problem=problem or pending_problem,
        task_id=task_id,
        found=found,
    )


async def retry_tasks(request: Request) -> Response:
    client = await client_of(request)
    count = await client.retry_failed_tasks()
    return done(request, "/events", f"Trying {counted(count, 'task')} again.")


async def _tasks(listing: AsyncIterator[Task]) -> tuple[list[Task], str]:
    """The tasks of a listing, and why others are missing."""
    tasks, error = await gathered(listing)
    if isinstance(error, Unauthenticated):
        raise error
    # In direct mode there are no tasks.
    is_direct = isinstance(error, FailedPrecondition) and error.reason == "DIRECT_MODE"
    return tasks, "" if error is None or is_direct else error.message
