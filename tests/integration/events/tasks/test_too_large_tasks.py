"""Tasks that a backend refuses as too large, or beside one that is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from libs.events.backend import QueueBackend
from libs.events.refusals import TooLarge
from libs.events.tasks import WriteTask
from libs.storage.database.roots import open_root
from libs.storage.objects.task_folders import task_folder
from services.ingest.tasks.bodies import TaskBodies
from slatemq.v1 import task_pb2
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.tasks.queued_ingest import eventually, queue_settings, queued

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running(RedisServer(tmp_path, "streams")) as started:
        yield started


async def test_a_task_that_is_stored_though_it_was_refused_as_too_large_is_applied_once(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ refuses what is on its way beside a task that is too large, and may have it."""
    enqueue_task, put = QueueBackend.enqueue_task, TaskBodies.put

    async def refuse_stored(backend: QueueBackend, task: WriteTask) -> str:
        task_id = await enqueue_task(backend, task)
        if "body" in task.payload:
            raise TooLarge("the one beside it")
        return task_id

    root = open_root("memory:///")
    async with queued(queue_settings("redis", redis), root) as ingest:

        async def put_behind(bodies: TaskBodies, task_id: str, body: bytes) -> dict[str, Any]:
            await ingest.applied(task_id)
            return await put(bodies, task_id, body)

        monkeypatch.setattr(QueueBackend, "enqueue_task", refuse_stored)
        monkeypatch.setattr(TaskBodies, "put", put_behind)

        # When it becomes a task with an object after it was applied
        task_id = await ingest.send_task(b"once")

        async def both_have_ended() -> bool:
            return not await ingest.pending() and not await root.objects.list(task_folder(0))

        # Then that one changes nothing
        await eventually(both_have_ended)
        assert await ingest.stored() == [b"once"]
        assert (await ingest.task(task_id)).state == task_pb2.TASK_STATE_APPLIED
