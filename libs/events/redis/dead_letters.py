"""The stream of dead letters: tasks and events that failed too often."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from redis import asyncio as aioredis

from libs.events.redis.streams import PAGE, read_stream
from libs.events.redis.transactions import Command
from libs.events.tasks import (
    FailedTask,
    UnreadableTask,
    WriteTask,
    encode_failed_task,
    format_server_time,
    read_dead_letter,
)


class DeadLetters:
    def __init__(self, client: aioredis.Redis, prefix: str) -> None:
        self._client = client
        self.key = f"{prefix}:dead-letter"

    def task_command(self, task: WriteTask, error: str) -> Command:
        """Adds a task whose last attempt failed."""
        failed = FailedTask.now(task, error)
        return self._add("kind", "task", "data", encode_failed_task(failed))

    def event_command(self, event: bytes, deliveries: int) -> Command:
        return self._add("kind", "event", "data", event, "deliveries", deliveries)

    def unreadable_command(self, raw: bytes, error: str) -> Command:
        """Adds an unreadable task, for an operator to look at; it is not retried."""
        return self._add("kind", "unreadable", "data", raw, "error", error)

    def _add(self, *fields: bytes | str | int) -> Command:
        return "XADD", self.key, "*", *fields

    async def count(self) -> int:
        return int(await self._client.xlen(self.key))

    async def tasks(self, limit: int) -> list[FailedTask | UnreadableTask]:
        """Tasks and unreadable ones, the oldest first."""
        found: list[FailedTask | UnreadableTask] = []
        async for _, dead_letter in self._tasks():
            if len(found) == limit:
                break
            found.append(dead_letter.without_payload())
        return found

    async def failed(self) -> AsyncIterator[Sequence[tuple[bytes, WriteTask]]]:
        """The tasks that are there now, some at a time, each behind the ID of its entry.

        The caller may remove them. Unreadable ones are left out.
        """
        some: list[tuple[bytes, WriteTask]] = []
        async for entry_id, dead_letter in self._tasks():
            if isinstance(dead_letter, FailedTask):
                some.append((entry_id, dead_letter.task))
            if len(some) == PAGE:
                yield some
                some = []
        if some:
            yield some

    async def _tasks(self) -> AsyncIterator[tuple[bytes, FailedTask | UnreadableTask]]:
        """The entries that are there now, without events."""
        client: Any = self._client
        for newest, _ in await client.xrevrange(self.key, count=1):
            async for entry_id, fields in read_stream(client, self.key, newest):
                if fields.get(b"kind") != b"event":
                    yield entry_id, self._read(entry_id, fields)

    def _read(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> FailedTask | UnreadableTask:
        name = entry_id.decode()
        properties = {
            "failed_at": format_server_time(int(name.partition("-")[0])),
            "kind": fields.get(b"kind", b"").decode(errors="replace"),
            "error": fields.get(b"error", b"").decode(errors="replace"),
        }
        return read_dead_letter(fields.get(b"data", b""), properties, f"entry {name} of {self.key}")
