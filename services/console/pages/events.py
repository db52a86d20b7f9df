"""Event queues: what each process publishes, and publishes that were accepted as tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

from services.console import formats
from services.console.rendering import client_of, done, field_of, render
from slatemq._admin.tasks import Task
from slatemq.errors import FailedPrecondition, SlateMQError, Unauthenticated

TASKS_SHOWN: Final = 100
"""Of each ingest."""


async def show_events(request: Request) -> Response:
    client = await client_of(request)
    # Together: each of them waits for processes that do not answer.
    statuses, (failed, problem), (pending, pending_problem) = await asyncio.gather(
        client.events_status(),
        _gathered(client.failed_tasks(TASKS_SHOWN)),
        _gathered(client.pending_tasks(TASKS_SHOWN)),
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
    return done(request, "/events", f"Trying {formats.counted(count, 'task')} again.")


async def _gathered(listing: AsyncIterator[Task]) -> tuple[list[Task], str]:
    """The tasks of a listing, and why others are missing."""
    tasks: list[Task] = []
    try:
        async for task in listing:
            tasks.append(task)  # noqa: PERF401 - what came before an error counts
    except FailedPrecondition as error:
        # In direct mode there are no tasks.
        return tasks, "" if error.reason == "DIRECT_MODE" else error.message
    except Unauthenticated:
        raise
    except SlateMQError as error:
        return tasks, error.message
    return tasks, ""
