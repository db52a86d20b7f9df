"""The stream of dead letters: tasks and events that failed too often."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from redis import asyncio as aioredis

from libs.events.tasks import FailedTask, WriteTask, decode_failed_task, encode_failed_task
from libs.events.wall_clock import now_ms
from slatemq.events.envelope import format_timestamp

_PAGE = 100

Pipeline = Any
"""redis-py's pipeline, whose type arguments differ between versions."""


class DeadLetters:
    """The dead-letter stream."""

    def __init__(self, client: aioredis.Redis, prefix: str) -> None:
        """Nothing is read or written yet."""
        self._client = client
        self.key = f"{prefix}:dead-letter"

    def add_task(self, pipeline: Pipeline, task: WriteTask, error: str) -> None:
        """Add a task, as a part of a transaction."""
        failed = FailedTask(task=task, error=error, failed_at=format_timestamp(now_ms()))
        pipeline.xadd(self.key, {"kind": "task", "data": encode_failed_task(failed)})

    def add_event(self, pipeline: Pipeline, event: bytes, deliveries: int) -> None:
        """Add an event, as a part of a transaction."""
        pipeline.xadd(self.key, {"kind": "event", "data": event, "deliveries": str(deliveries)})

    def add_unreadable(self, pipeline: Pipeline, raw: bytes, error: str) -> None:
        """Add what is not a task, for an operator to look at; it is not retried."""
        pipeline.xadd(self.key, {"kind": "unreadable", "data": raw, "error": error})

    async def count(self) -> int:
        """All of them."""
        return int(await self._client.xlen(self.key))

    async def tasks(self, limit: int) -> list[tuple[bytes, FailedTask]]:
        """Tasks with the IDs of their entries, the oldest first."""
        found: list[tuple[bytes, FailedTask]] = []
        after = "-"
        while len(found) < limit:
            page: Any = await self._client.xrange(self.key, min=after, count=_PAGE)
            found += [
                (entry_id, decode_failed_task(fields[b"data"]))
                for entry_id, fields in page
                if fields[b"kind"] == b"task"
            ]
            if len(page) < _PAGE:
                break
            after = "(" + page[-1][0].decode()
        return found[:limit]

    async def retry_tasks(self, retry: Callable[[WriteTask, bytes], Awaitable[None]]) -> int:
        """Give each task, as if new, and the ID of its entry to `retry`; returns how many.

        `retry` removes the entry.
        """
        count = 0
        while failed := await self.tasks(_PAGE):
            for entry_id, dead_letter in failed:
                await retry(dead_letter.task.renewed(), entry_id)
                count += 1
        return count
