"""What a publish has stored, also where it was accepted as a task."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from slatemq.errors import DeadlineExceeded, FailedPrecondition

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from slatemq._admin.tasks import Task
    from slatemq._publish.published import Published
    from slatemq.client import Client


def check_failed(task: Task) -> None:
    """Raise FailedPrecondition for a task that has failed."""
    if task.state.value == "failed":
        raise FailedPrecondition("TASK_FAILED", f"{task.task_id} failed: {task.error}")


async def applied(
    client: Client, published: Sequence[Published], timeout: timedelta
) -> list[Published]:
    """The same messages, those of tasks as they were applied.

    What is still pending after `timeout` stays as it was accepted. Raises FailedPrecondition where
    a task has failed, and the errors of `Client.wait_task`.
    """
    ids = dict.fromkeys(one.task_id for one in published if one.task_id)
    waited = await asyncio.gather(*(client.wait_task(task_id, timeout) for task_id in ids))
    tasks = dict(zip(ids, waited, strict=True))
    results = list(published)
    for place, one in enumerate(results):
        if not one.task_id:
            continue
        task = tasks[one.task_id]
        check_failed(task)
        if task.state.value == "applied":
            results[place] = task.published[one.task_place]
    return results


async def stored(
    client: Client, published: Sequence[Published], timeout: timedelta
) -> list[Published]:
    """As `applied`, and raises DeadlineExceeded where a task is still pending."""
    results = await applied(client, published, timeout)
    for one in results:
        if one.task_id:
            raise DeadlineExceeded(
                f"{one.task_id} is still pending: its messages are accepted, and not stored yet",
                reason="TASK_PENDING",
            )
    return results
