"""Cancellations that client libraries lose."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keeping_cancellations() -> Iterator[None]:
    """Raises CancelledError at the end if the task was cancelled meanwhile.

    redis-py and aiormq send with `asyncio.wait_for`, which before Python 3.12 returns normally when
    it is cancelled as the sending ends. A loop over such calls would never end, and `close`, which
    waits for it, would hang.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
