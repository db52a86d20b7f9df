"""Moves dead letters back to the tasks, to the end, whatever becomes of the call that asked for it.

Thousands of them may take longer than one attempt of a call. A client then repeats the call, which
waits for what the first one began.
"""

from __future__ import annotations

import asyncio

from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.outcomes import TaskOutcomes


class Retries:
    """The retries of one shard's failed tasks, one at a time."""

    def __init__(self, backend: TaskBackend, outcomes: TaskOutcomes) -> None:
        self._backend = backend
        self._outcomes = outcomes
        self._running: asyncio.Task[int] | None = None
        self._calls_count = 0
        self._unanswered_count = 0

    async def retry(self) -> int:
        """Move all dead letters back; returns how many, with those that no call has the count of.

        Raises Unavailable.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._calls_count += 1
        try:
            return await asyncio.shield(self._running)
        finally:
            self._calls_count -= 1

    async def _run(self) -> int:
        try:
            moved_count = await self._backend.connected.retry_failed_tasks(
                self._outcomes.moving_back
            )
            count = self._unanswered_count + moved_count
            self._unanswered_count = 0 if self._calls_count else count
            return count
        finally:
            self._running = None

    async def close(self) -> None:
        """Stop; what is not moved stays among the dead letters."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])
