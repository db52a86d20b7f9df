"""What an exception says of the work in which it was raised."""

from __future__ import annotations

import asyncio


def has_failed(error: BaseException) -> bool:
    """Whether work failed, rather than was cancelled or stopped with the program.

    A CancelledError without a cancellation of this task, say of one that it awaited, is a failure.
    """
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and not task.cancelling()
    return isinstance(error, Exception)


def reason_of(error: BaseException) -> str:
    """What a nack says of an exception."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
