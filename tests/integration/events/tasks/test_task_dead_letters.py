"""Tasks in the dead-letter place, and what lies there and is none."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from grpc.aio import AioRpcError
from redis import asyncio as aioredis

from libs.events.backend import QueueBackend
from libs.events.redis.streams import PAGE
from libs.events.settings import QueueSettings
from libs.events.tasks import ERROR_BYTES_MAX, Moving, WriteTask
from libs.serving.peers.channels import open_channel
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from services.ingest.config import IngestConfig
from services.ingest.tasks.consumer import TaskConsumer
from slatemq.errors import Unavailable
from slatemq.v1 import task_pb2
from tests.configs import config_of
from tests.integration.events.backends.servers import Server
from tests.integration.events.tasks.queued_ingest import (
    BACK,
    QueuedIngest,
    beside,
    body_path,
    enqueue,
    eventually,
    names_of_shard,
    new_task_id,
    queue_settings,
    queued,
    until_connected,
)
from tests.integration.ingest.server import Server as IngestServer

pytestmark = pytest.mark.slow  # Real servers, whose redeliveries take their delays.

PENDING, FAILED = task_pb2.TASK_STATE_PENDING, task_pb2.TASK_STATE_FAILED


async def test_a_poison_task_is_a_dead_letter_with_its_error_until_it_is_retried(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    root = tmp_path.as_uri()
    settings = queue_settings(*backend, max_retries=1, retry_delay_ms=200)
    # Given a task whose body someone has taken away, and one behind it
    async with queued(settings, root) as ingest:
        objects = open_root(root).objects
        task_id = new_task_id()
        path = body_path(task_id)
        await enqueue(settings, task_id, {"content_length": 4, "data_ref": path})
        good = await ingest.send_task(b"good")

        # Then it fails after its retries, and the other one is applied
        await ingest.applied(good)
        task = await ingest.wait(task_id)
        assert (task.state, task.attempts_count) == (FAILED, 2)
        assert "no object at" in task.error

        async def is_dead() -> bool:
            return [one.task_id for one in await ingest.failed()] == [task_id]

        await eventually(is_dead)
        assert (await ingest.failed())[0].error == task.error

        # When the cause is removed and it is retried, then it is applied, once
        await objects.put(path, BACK)
        assert await ingest.retry() == 1
        (message_id,) = await ingest.applied(task_id)
        assert await ingest.payloads(message_id) == [b"back"]
        assert await ingest.failed() == []
        assert await ingest.retry() == 0
        assert sorted(await ingest.stored()) == [b"back", b"good"]


async def test_a_failed_task_is_pending_until_its_dead_letter_is_there(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    fail_task = QueueBackend.fail_task

    async def fail_behind_gate(measured: QueueBackend, task_id: str, error: str) -> bool:
        reached.set()
        await gate.wait()
        return await fail_task(measured, task_id, error)

    monkeypatch.setattr(QueueBackend, "fail_task", fail_behind_gate)
    settings = queue_settings(*backend, max_retries=0)
    async with queued(settings) as ingest:
        # Given a task whose last attempt has failed, and a backend that has no dead letter yet
        task_id = new_task_id()
        await enqueue(settings, task_id, {"content_length": 1, "body": "AA=="})
        await reached.wait()

        # Then it is pending, with its error
        pending = await ingest.task(task_id)
        assert (pending.state, pending.attempts_count) == (PENDING, 1)
        assert "is not a PublishRequest" in pending.error

        # And it has failed once the dead letter is there
        waiting = asyncio.create_task(ingest.wait(task_id))
        gate.set()
        assert (await waiting).state == FAILED
        assert [one.task_id for one in await ingest.failed()] == [task_id]


async def test_a_task_that_is_lost_before_its_last_attempt_fails_is_pending_until_it_is_applied(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, ended = asyncio.Queue[QueueBackend](), asyncio.Queue[bool]()
    gate, may_dequeue = asyncio.Event(), asyncio.Event()
    fail_task, dequeue_task = QueueBackend.fail_task, QueueBackend.dequeue_task

    async def fail_behind_gate(measured: QueueBackend, task_id: str, error: str) -> bool:
        await reached.put(measured)
        await gate.wait()
        has_ended = await fail_task(measured, task_id, error)
        await ended.put(has_ended)
        return has_ended

    async def dequeue_when_allowed(measured: QueueBackend) -> WriteTask | None:
        await may_dequeue.wait()
        return await dequeue_task(measured)

    monkeypatch.setattr(QueueBackend, "fail_task", fail_behind_gate)
    monkeypatch.setattr(QueueBackend, "dequeue_task", dequeue_when_allowed)
    may_dequeue.set()
    root, settings = tmp_path.as_uri(), queue_settings(*backend, max_retries=0)
    async with queued(settings, root) as ingest:
        # Given a caller that waits for a task, whose last attempt fails
        task_id = await enqueue_poison(settings)
        waiting = asyncio.create_task(ingest.wait(task_id))
        connected = await reached.get()

        # When the connection is lost before the backend knows of that, and the cause is removed
        await put_bodies(root, task_id)
        may_dequeue.clear()  # a delivery that came before the failure would fail in its place
        await connected.close()
        await connected.connect(names_of_shard(settings))
        gate.set()
        assert not await ended.get()
        may_dequeue.set()

        # Then its caller does not learn of a failure: it comes again, and is applied
        assert (await waiting).state == task_pb2.TASK_STATE_APPLIED
        assert await ingest.stored() == [b"back"]
        assert await ingest.failed() == []


async def enqueue_poison(settings: QueueSettings) -> str:
    """A task whose body is not there; gives its ID."""
    task_id = new_task_id()
    await enqueue(settings, task_id, {"content_length": 4, "data_ref": body_path(task_id)})
    return task_id


async def put_bodies(root: str, *task_ids: str) -> None:
    for task_id in task_ids:
        await open_root(root).objects.put(body_path(task_id), BACK)


class Gate:
    """Holds tasks back that the backend has given out."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = asyncio.Event()
        self.reached: set[str] = set()
        apply = TaskConsumer._apply

        async def apply_behind_gate(consumer: TaskConsumer, task: WriteTask, *rest: Any) -> None:
            self.reached.add(task.task_id)
            await self.open.wait()
            await apply(consumer, task, *rest)

        monkeypatch.setattr(TaskConsumer, "_apply", apply_behind_gate)

    async def wait(self, *task_ids: str) -> None:
        async def have_reached() -> bool:
            return self.reached.issuperset(task_ids)

        await eventually(have_reached)


async def test_retried_tasks_are_pending_until_they_are_applied(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, settings = tmp_path.as_uri(), queue_settings(*backend, max_retries=0)
    async with queued(settings, root) as ingest:
        # Given dead letters whose cause is removed
        both = [await enqueue_poison(settings) for _ in range(2)]
        assert [(await ingest.wait(one)).state for one in both] == [FAILED, FAILED]
        await put_bodies(root, *both)

        # When all are retried, then each is pending, also once it is given out
        gate = Gate(monkeypatch)
        assert await ingest.retry() == 2
        assert [(await ingest.task(one)).state for one in both] == [PENDING, PENDING]
        await gate.wait(*both)
        assert [(await ingest.task(one)).state for one in both] == [PENDING, PENDING]
        gate.open.set()
        for one in both:
            await ingest.applied(one)


async def test_dead_letters_that_cannot_be_retried_now_have_failed_as_before(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lose_connection(measured: QueueBackend, moving: Moving) -> int:
        with moving([task_id]):
            raise Unavailable("the backend went down", reason="BACKEND_DOWN")

    root, settings = tmp_path.as_uri(), queue_settings(*backend, max_retries=0)
    async with queued(settings, root) as ingest:
        # Given a dead letter, and a backend that goes down while it is to be retried
        task_id = await enqueue_poison(settings)
        failed = await ingest.wait(task_id)
        assert failed.state == FAILED
        with monkeypatch.context() as patched:
            patched.setattr(QueueBackend, "retry_failed_tasks", lose_connection)
            with pytest.raises(Unavailable):
                await ingest.retry()

        # Then it has failed, as before
        assert await ingest.task(task_id) == failed

        # And it can be retried later
        await put_bodies(root, task_id)
        assert await ingest.retry() == 1
        await ingest.applied(task_id)


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_a_body_that_was_damaged_is_not_published(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    root, settings = tmp_path.as_uri(), queue_settings(*backend, max_retries=0)
    async with queued(settings, root) as ingest:
        # Given a body that is not what was accepted, and one that was cut off
        for body in (BACK.replace(b"back", b"bads"), BACK[:-1]):
            task_id = new_task_id()
            await open_root(root).objects.put(body_path(task_id), body)
            await enqueue(settings, task_id, {"content_length": 4, "data_ref": body_path(task_id)})

            # Then the task fails, and says which object it is
            task = await ingest.wait(task_id)
            assert (task.state, task.attempts_count) == (FAILED, 1)
            assert f"{body_path(task_id)} is damaged" in task.error
        assert await ingest.stored() == []


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_no_task_stays_pending_where_the_call_that_retries_it_ends_before_the_store_is_back(
    backend: tuple[str, Server],
) -> None:
    settings = queue_settings(*backend, max_retries=0)
    config = config_of(IngestConfig, root="memory:///", queue=settings)
    server = IngestServer(config, Telemetry())
    await server.start()
    try:
        async with open_channel(server.address) as channel:
            ingest = QueuedIngest(channel)
            await until_connected(ingest)
            # Given a dead letter, and a store that is away
            task_id = await enqueue_poison(settings)
            assert (await ingest.wait(task_id)).state == FAILED
            shard = server.service._shard
            assert shard is not None
            async with shard.publisher.commits.hold:
                # When a call that retries it has ended before the store is back
                with suppress(AioRpcError):
                    await ingest.tasks.RetryFailedTasks(
                        task_pb2.RetryFailedTasksRequest(), timeout=1
                    )

            # Then the task has failed again, and is among the dead letters
            assert (await ingest.wait(task_id)).state == FAILED
            assert [one.task_id for one in await ingest.failed()] == [task_id]
    finally:
        await server.stop()


@pytest.mark.parametrize("backend", ["redis"], indirect=True)
async def test_more_dead_letters_than_are_moved_together_are_retried_in_their_order(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    root, settings = tmp_path.as_uri(), queue_settings(*backend, max_retries=0)
    async with queued(settings, root) as ingest:
        task_ids = [await enqueue_poison(settings) for _ in range(2 * PAGE + 1)]
        for task_id in task_ids:
            assert (await ingest.wait(task_id)).state == FAILED
        # Tasks that fail at the same time become dead letters in any order.
        failed_ids = [one.task_id for one in await ingest.failed()]
        assert sorted(failed_ids) == sorted(task_ids)
        await put_bodies(root, *task_ids)
        assert await ingest.retry() == len(task_ids)
        message_ids = [(await ingest.applied(task_id))[0] for task_id in failed_ids]
        assert message_ids == sorted(message_ids)
        assert await ingest.failed() == []


async def test_a_task_that_a_crash_kept_from_its_dead_letter_is_pending_when_it_comes_again(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = asyncio.Event()

    async def hang(measured: QueueBackend, task_id: str, error: str) -> bool:
        reached.set()
        return await asyncio.Event().wait()

    root, settings = tmp_path.as_uri(), queue_settings(*backend, max_retries=0)
    # Given a task that has failed for the last time, and an ingest that ends before the backend
    # has its dead letter
    with monkeypatch.context() as patched:
        patched.setattr(QueueBackend, "fail_task", hang)
        async with queued(settings, root):
            task_id = await enqueue_poison(settings)
            await reached.wait()
    await put_bodies(root, task_id)

    # When the next one gets the task, then it is pending until it is applied
    gate = Gate(monkeypatch)
    async with queued(settings, root) as ingest:
        await gate.wait(task_id)
        assert (await ingest.task(task_id)).state == PENDING
        gate.open.set()
        await ingest.applied(task_id)


async def test_what_is_not_a_task_goes_to_the_dead_letters_and_others_are_applied(
    backend: tuple[str, Server],
) -> None:
    settings = queue_settings(*backend, max_retries=0)
    redis = settings.redis
    async with queued(settings) as ingest, aioredis.Redis.from_url(redis.url) as client:
        # Given what no ingest has made, and a task whose ID no ingest has made
        key = f"{redis.stream_prefix}.ingest-0:tasks"
        quoted = b'{"task_id":"%s","operation":"a","created_at":"a","payload":{}}'
        long = quoted % (b"A" * 600_000)
        strange: list[dict[str, bytes]] = [{"task": b"not JSON"}, {"task": long}]
        if redis.task_structure == "lists":
            await client.rpush(key, *(one["task"] for one in strange))
        else:
            strange.append({"another": b"field"})
            for fields in strange:
                await client.xadd(key, dict(fields))
        foreign = "task_01KJ2KH1G0J9FEYRWH6ATYF8WE"
        await enqueue(settings, foreign, {"content_length": 1, "body": "AA=="})

        # When a publish comes behind them, then it is applied
        await ingest.applied(await ingest.send_task(b"behind it"))
        assert await ingest.stored() == [b"behind it"]

        # And the others are dead letters with their errors, and nowhere else
        async def are_dead() -> bool:
            wanted = ["", *([""] * (len(strange) - 1)), foreign]
            return [one.task_id for one in await ingest.failed()] == wanted

        await eventually(are_dead)
        *unreadable, last = await ingest.failed()
        assert "one of its characters is wrong" in last.error
        dead = f"{key[:-5]}dead-letter"
        assert all(f" of {dead}: " in one.error for one in unreadable)
        assert max(len(one.error) for one in unreadable) < 2 * ERROR_BYTES_MAX
        dead_letters = [fields for _, fields in await client.xrange(dead)]
        assert [one[b"data"] for one in dead_letters[:2]] == [b"not JSON", long]
        async with beside(settings) as waiting:
            assert (await waiting.stats()).pending_tasks == 0


async def test_a_damaged_dead_letter_is_reported_and_hinders_no_other(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    root = tmp_path.as_uri()
    settings = queue_settings(*backend, max_retries=0)
    dead = f"{settings.redis.stream_prefix}.ingest-0:dead-letter"
    task_id = new_task_id()
    path = body_path(task_id)
    async with queued(settings, root) as ingest, aioredis.Redis.from_url(settings.redis.url) as one:
        # Given damaged dead letters before and behind one that is whole
        made = {"task_id": new_task_id(), "operation": "Publish", "payload": {}}
        at = {"failed_at": "2026-02-22T12:00:00.000Z"}
        of_others = [
            {"task": made | {"created_at": at["failed_at"]}, "failed_at": "yesterday"},
            {"task": made | {"created_at": at["failed_at"], "attempts": 1 << 40}, **at},
        ]
        damaged: list[dict[Any, Any]] = [
            {"kind": "task", "data": "{"},
            {"kind": "task"},
            {"x": "y"},
            *({"kind": "task", "data": json.dumps({"error": "e", **one})} for one in of_others),
        ]
        for fields in damaged:
            await one.xadd(dead, fields)
        await enqueue(settings, task_id, {"content_length": 4, "data_ref": path})
        assert (await ingest.wait(task_id)).state == FAILED

        async def is_dead() -> bool:
            return task_id in [failed.task_id for failed in await ingest.failed()]

        await eventually(is_dead)
        await one.xadd(dead, damaged[0])

        # Then all are listed, and the whole one can be retried
        listed = await ingest.failed()
        assert [failed.task_id for failed in listed] == [*[""] * len(damaged), task_id, ""]
        assert all(failed.ended_at_ms for failed in listed)
        assert listed[0].error.startswith("unreadable: entry ")
        await open_root(root).objects.put(path, BACK)
        assert await ingest.retry() == 1
        await ingest.applied(task_id)
        assert [failed.task_id for failed in await ingest.failed()] == [""] * (len(damaged) + 1)
        assert await ingest.retry() == 0
