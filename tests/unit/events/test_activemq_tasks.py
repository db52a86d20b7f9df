"""Tasks in ActiveMQ that fail as soon as they are retried."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from libs.events.settings import ActivemqSettings
from libs.events.tasks import FailedTask, WriteTask, decode_task, encode_failed_task
from slatemq._admin.task_ids import TaskIds

pytest.importorskip(
    "proton", reason="requirements/activemq.txt, which takes a C compiler, is not installed"
)

from libs.events.activemq import tasks as activemq_tasks
from libs.events.activemq.connection import Connections


class DeadLetter:
    """A dead letter of the kind `task`, in a list that it leaves when it is accepted."""

    def __init__(self, task: WriteTask, dead_letters: list[DeadLetter]) -> None:
        self.properties = {"kind": "task"}
        self.body = encode_failed_task(FailedTask.now(task, "refused"))
        self._dead_letters = dead_letters
        dead_letters.append(self)

    def accept(self) -> None:
        self._dead_letters.remove(self)


class FailingServer(Connections):
    """Makes each task that is enqueued a dead letter."""

    def __init__(self) -> None:
        super().__init__(ActivemqSettings())
        self.dead_letters: list[DeadLetter] = []
        self.enqueued: list[str] = []

    async def send(self, address: str, *messages: Any) -> None:
        for message in messages:
            task = decode_task(message.body)
            self.enqueued.append(task.task_id)
            DeadLetter(task, self.dead_letters)

    async def receive(self, address: str, browse: bool = False) -> Any:
        return SimpleNamespace(drain=self._drain, close=self._close)

    async def _drain(self, limit: int) -> list[DeadLetter]:
        await asyncio.sleep(0)
        return self.dead_letters[:limit]

    async def _close(self) -> None:
        """What was not accepted is still there."""


async def test_dead_letters_that_fail_again_at_once_are_retried_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given as many dead letters as one look has, which fail whenever they are retried
    monkeypatch.setattr(activemq_tasks, "BROWSED_MAX", 3)
    server = FailingServer()
    names = [TaskIds(0).make(number) for number in range(3)]
    for name in names:
        task = WriteTask(
            task_id=name, operation="Publish", created_at="2026-02-22T12:00:00.000Z", payload={}
        )
        DeadLetter(task, server.dead_letters)

    # When they are retried, then that ends, and they are dead letters again
    async with asyncio.timeout(60):
        assert await activemq_tasks.Tasks(server).retry_all(nullcontext) == 3
    assert server.enqueued == names
    assert len(server.dead_letters) == 3
