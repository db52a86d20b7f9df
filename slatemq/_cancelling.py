"""Cancellations: ending tasks of the event loop, and whose cancellation an error is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any


async def end_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks; returns once all of them have ended, however they did."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


def is_cancelled() -> bool:
    """Whether the current task is being cancelled: what it waits for may be, without it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
