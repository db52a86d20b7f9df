"""An ingest whose publishes are tasks, in this process or in one of its own."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.settings import Consistency, QueueSettings
from libs.events.tasks import WriteTask
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import Root
from libs.storage.objects.task_folders import body_name, task_folder
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import INLINE_BODY_BYTES_MAX
from slatemq._admin.task_ids import TaskIds
from slatemq._rpc.rpc_status import raising_slatemq_errors
from slatemq.errors import Unavailable
from slatemq.v1 import ingest_pb2, task_pb2, task_pb2_grpc
from tests.integration.events.backends.servers import PreparedServer, Server
from tests.integration.ingest.server import Ingest, message, serving
from tests.integration.waiting import WAIT_SECONDS

EVENTUALLY_S = WAIT_SECONDS

LARGE = bytes(range(256)) * (INLINE_BODY_BYTES_MAX // 256 + 1)
"""A payload that does not travel in its task."""


def queue_settings(
    backend: str, server: Server, consistency: Consistency = "async", **changes: Any
) -> QueueSettings:
    """Settings with names that nothing else uses."""
    section = msgspec.structs.replace(server.settings(f"t{uuid.uuid4().hex[:8]}"), **changes)
    if isinstance(server, PreparedServer):
        shards = (f"{section.queue_prefix}.ingest-{shard}" for shard in range(2))
        names = [msgspec.structs.replace(section, queue_prefix=prefix) for prefix in shards]
        server.prepare(section, *names)
    return msgspec.structs.replace(
        QueueSettings(enabled=True, consistency=consistency),
        backend=backend,
        **{backend: section},
    )


def write_config(folder: Path, settings: QueueSettings) -> Path:
    """The file for `--config`."""
    file = folder / "slatemq.yaml"
    section = msgspec.to_builtins(getattr(settings, settings.backend))
    queue = {
        "enabled": True,
        "backend": settings.backend,
        "consistency": settings.consistency,
        settings.backend: section,
    }
    file.write_text(yaml.safe_dump({"queue": queue}))
    return file


class QueuedIngest(Ingest):
    """A client of such an ingest."""

    @property
    def tasks(self) -> Any:
        """The stub of its TaskService."""
        return task_pb2_grpc.TaskServiceStub(self.channel)

    async def enqueue(
        self, *messages: ingest_pb2.PublishRun, request_id: str = ""
    ) -> ingest_pb2.PublishResponse:
        """Publish; gives the whole answer."""
        request = ingest_pb2.PublishRequest(runs=messages, request_id=request_id)
        with raising_slatemq_errors():
            answer: ingest_pb2.PublishResponse = await self.stub.Publish(request, timeout=60)
            return answer

    async def send_task(self, payload: bytes, request_id: str = "", **headers: str) -> str:
        """Publish one message; gives the ID of the task."""
        answer = await self.enqueue(message(payload, **headers), request_id=request_id)
        assert list(answer.message_ids) == [0]
        return str(answer.task_id)

    async def task(self, task_id: str) -> task_pb2.Task:
        """What is known of a task."""
        with raising_slatemq_errors():
            request = task_pb2.GetTaskRequest(task_id=task_id)
            answer: task_pb2.GetTaskResponse = await self.tasks.GetTask(request, timeout=30)
            return answer.task

    async def wait(self, task_id: str, seconds: float = EVENTUALLY_S) -> task_pb2.Task:
        """A task once it is applied or has failed."""
        request = task_pb2.WaitTaskRequest(task_id=task_id)
        with raising_slatemq_errors():
            answer: task_pb2.WaitTaskResponse = await self.tasks.WaitTask(request, timeout=seconds)
            return answer.task

    async def applied(self, task_id: str) -> list[int]:
        """The IDs of a task's messages, once it is applied."""
        task = await self.wait(task_id)
        assert task.state == task_pb2.TASK_STATE_APPLIED, task
        return list(task.message_ids)

    async def failed(self) -> list[task_pb2.Task]:
        """The tasks in the dead-letter place."""
        with raising_slatemq_errors():
            request = task_pb2.ListFailedTasksRequest()
            return list((await self.tasks.ListFailedTasks(request, timeout=30)).tasks)

    async def pending(self, limit: int = 0) -> list[task_pb2.Task]:
        """The tasks that wait to be applied."""
        with raising_slatemq_errors():
            request = task_pb2.ListPendingTasksRequest(limit=limit)
            return list((await self.tasks.ListPendingTasks(request, timeout=30)).tasks)

    async def retry(self) -> int:
        """Retry what failed."""
        with raising_slatemq_errors():
            request = task_pb2.RetryFailedTasksRequest()
            return int((await self.tasks.RetryFailedTasks(request, timeout=30)).retried_count)

    async def stored(self) -> list[bytes]:
        """The payloads of all messages in the log."""
        ids = [one.message_id for one in await self.log()]
        found: list[bytes] = []
        for start in range(0, len(ids), 200):
            found += await self.payloads(*ids[start : start + 200])
        return found


@asynccontextmanager
async def queued(
    settings: QueueSettings, root: str | Root = "memory:///", **more: Any
) -> AsyncIterator[QueuedIngest]:
    """One in this process."""
    async with serving(root, queue=settings, **more) as ingest:
        client = QueuedIngest(ingest.channel)
        await until_connected(client)
        yield client


async def until_connected(ingest: QueuedIngest) -> None:
    """Wait until it has its backend."""
    await eventually(ingest.failed)


async def eventually(call: Callable[[], Any], seconds: float = EVENTUALLY_S) -> None:
    """Wait until a call raises no Unavailable and gives no False."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                if await call() is not False:
                    return
            except Unavailable:
                pass
            await asyncio.sleep(0.05)


BACK: Final = ingest_pb2.PublishRequest(runs=[message(b"back")]).SerializeToString()


def body_path(task_id: str, body: bytes = BACK) -> str:
    """Where an ingest takes the body of a task from, whatever backend it is of."""
    return f"{task_folder(0)}/{body_name(task_id, body)}"


def new_task_id() -> str:
    """The ID of a task that the ingest of shard 0 might have accepted now."""
    return TaskIds(0).make(int(time.time() * 1000))


async def enqueue(
    settings: QueueSettings,
    task_id: str,
    payload: dict[str, object],
    max_retries: int | None = None,
) -> None:
    """Put a task into the backend beside the ingest; None: with the retries of the settings."""
    if max_retries is None:
        max_retries = names_of_shard(settings).max_retries
    async with beside(settings) as backend:
        await backend.enqueue_task(
            WriteTask(
                task_id=task_id,
                operation="Publish",
                created_at="2026-02-22T12:00:00.000Z",
                max_retries=max_retries,
                payload=payload,
            )
        )


@asynccontextmanager
async def beside(settings: QueueSettings, shard: int = 0) -> AsyncIterator[QueueBackend]:
    """The backend with the names of an ingest, whose tasks it leaves to that one."""
    backend = open_backend(settings.backend)
    try:
        await backend.connect(names_of_shard(settings, shard))
        yield backend
    finally:
        await backend.close()


def names_of_shard(settings: QueueSettings, shard: int = 0) -> Any:
    """The section of the backend, with the names that the ingest of a shard has there."""
    return TaskBackend(settings, shard, Telemetry().meter).section
