"""What the consumer counts as an attempt of a task, with a backend that gives out a list."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from libs.events.tasks import WriteTask
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.ingest import wire
from services.ingest.batches import Accepted
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import TaskBodies
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.outcomes import TaskOutcomes
from services.ingest.tasks.traces import TaskTraces
from slatemq._admin.task_ids import TaskIds
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from tests.integration.waiting import eventually
from tests.unit.ingest.shards import opened

T = TypeVar("T")

UNSTORABLE = b"unstorable"


class Listed:
    """A backend with these tasks.

    Attributes:
        failed: The tasks of which an attempt was counted, and why.
    """

    def __init__(self, tasks: list[WriteTask]) -> None:
        self._tasks = tasks
        self.failed: dict[str, str] = {}
        self.is_empty = asyncio.Event()

    async def until_done(self, call: Callable[[Listed], Awaitable[T]]) -> T:
        return await call(self)

    async def dequeue_task(self) -> WriteTask:
        if self._tasks:
            return self._tasks.pop(0)
        self.is_empty.set()
        await asyncio.Event().wait()
        raise AssertionError("a wait without end has ended")

    async def complete_task(self, task_id: str) -> None:
        raise AssertionError(f"{task_id} is applied, though its commit failed")

    async def fail_task(self, task_id: str, error: str) -> bool:
        self.failed[task_id] = error
        return True


def accept(body: bytes) -> Accepted:
    rules = wire.Rules(64 << 20, 3600, 900_000)
    accepted = wire.accept(PublishRequest.FromString(body), rules)
    if accepted.payloads == [UNSTORABLE]:
        accepted.columns.retention_s = [1 << 32]  # which has 32 bits on disk
    return accepted


async def test_tasks_behind_one_that_cannot_be_encoded_lose_no_attempt_by_it() -> None:
    root = open_root("memory:///")
    async with opened(root) as shard:
        # Given tasks that have failed before: the first cannot be encoded, the next one is stored
        stored = PublishRequest(runs=[PublishRun(payloads=[b"stored"])], request_id="known")
        await shard.publisher.publish(accept(stored.SerializeToString()))
        bodies = TaskBodies(root.objects, 0, "none")
        ids = TaskIds(0)
        tasks: list[WriteTask] = []
        requests = [
            PublishRequest(runs=[PublishRun(payloads=[payload])])
            for payload in (UNSTORABLE, *[b"good"] * 5)
        ]
        for request in (requests[0], stored, *requests[1:]):
            task_id = ids.make(shard.clock.now_ms())
            tasks.append(
                WriteTask(
                    task_id=task_id,
                    operation="Publish",
                    created_at="2026-02-22T12:00:00.000Z",
                    attempts=1,
                    max_retries=1,
                    payload=await bodies.put(task_id, request.SerializeToString()),
                )
            )
        first = tasks[0].task_id
        backend = Listed([*tasks])
        consumer = TaskConsumer(
            shard.publisher,
            cast("TaskBackend", backend),
            bodies,
            TaskOutcomes(shard.database, shard.publisher, shard.clock),
            accept,
            TaskTraces(Telemetry()),
            shard.clock,
        )

        # When all wait for the commit of the first, and it fails
        async with shard.publisher.commits.hold:
            running = asyncio.create_task(consumer.run())
            await backend.is_empty.wait()
        await eventually(lambda: first in backend.failed)
        for _ in range(100):  # Steps that the others would need, too.
            await asyncio.sleep(0)

        # Then the attempt is of that one alone, and it is still so when the process ends
        running.cancel()
        await asyncio.wait([running])
        assert backend.failed.keys() == {first}
        assert "log entry" in backend.failed[first]
