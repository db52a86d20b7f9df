"""Cancellations that client libraries lose, and those that they make up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keeping_cancellations() -> Iterator[None]:
    """Raises CancelledError at the end if the task was cancelled meanwhile, and only then.

    redis-py and aiormq send with `asyncio.wait_for`, which before Python 3.12 returns normally when
    it is cancelled as the sending ends. A loop over such calls would never end, and `close`, which
    waits for it, would hang.

    aiormq ends the calls of a connection that is silent for too long with a CancelledError, though
    no task was cancelled: that raises ConnectionError. A task that waits for it would end without
    an error, unnoticed.
    """
    task = asyncio.current_task()
    before = 0 if task is None else task.cancelling()
    try:
        yield
    except asyncio.CancelledError as error:
        if task is None or task.cancelling() > before:
            raise
        raise ConnectionError("the client library gave the connection up") from error
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
