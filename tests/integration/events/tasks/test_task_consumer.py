"""The consumer of tasks on a shard whose blobs are held back: what comes twice, what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

import slatemq
from libs.events.backend import BackendStats, QueueBackend
from libs.events.settings import QueueSettings
from libs.events.slatemq.headers import TASKS_HEADER
from libs.events.tasks import UnreadableTask, WriteTask
from libs.serving.telemetry import Telemetry
from libs.storage.database.blobs import UPLOAD_AGE_MS_MAX
from libs.storage.database.roots import Root, open_root
from libs.storage.errors import Unstorable
from libs.storage.records.task_records import AppliedTask, FailedTaskRecord
from services.ingest import wire
from services.ingest.batches import Accepted
from services.ingest.shard import Shard
from services.ingest.tasks import consumer
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import TaskBodies, within_task
from services.ingest.tasks.consumer import TaskConsumer
from services.ingest.tasks.outcomes import TaskOutcomes
from services.ingest.tasks.traces import TaskTraces
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import InvalidArgument
from slatemq.v1.ingest_pb2 import PublishRequest, PublishRun
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.conftest import SERVERS, eventually, served
from tests.integration.events.tasks.queued_ingest import queue_settings
from tests.integration.waiting import WAIT_SECONDS
from tests.manual_clock import ManualClock
from tests.unit.ingest.shards import GatedObjects, opened, sequences

pytestmark = pytest.mark.slow  # Real servers.

UNSTORABLE = b"unstorable"
"""A payload whose message cannot be encoded."""

BLOB = bytes(65_536)
"""A payload that is stored as an object: it waits at the gate."""


@pytest.fixture(
    scope="module",
    params=[
        "redis",
        "redis-lists",
        pytest.param("slatemq", marks=[pytest.mark.stack, pytest.mark.proof]),
    ],
)
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


class Consuming:
    """A consumer at work on a shard, and the backend that its tasks come from.

    Attributes:
        refusals: How many of the next bodies are refused.
    """

    def __init__(self, settings: QueueSettings, root: Root, shard: Shard) -> None:
        self.refusals = 0
        self.shard = shard
        self.backend = TaskBackend(settings, 0, Telemetry().meter)
        self.outcomes = TaskOutcomes(shard.database, shard.publisher, shard.clock)
        self.consumer = TaskConsumer(
            shard.publisher,
            self.backend,
            TaskBodies(root.objects, 0, self.backend.place),
            self.outcomes,
            self._accept,
            TaskTraces(Telemetry()),
            shard.clock,
        )

    def _accept(self, body: bytes) -> Accepted:
        if body == b"poison" or self.refusals:
            self.refusals = max(0, self.refusals - 1)
            raise InvalidArgument("payload.body", "is poison")
        rules = wire.Rules(64 << 20, 3600, 900_000)
        accepted = wire.accept(PublishRequest.FromString(body), rules)
        if accepted.payloads == [UNSTORABLE]:
            accepted.columns.retention_s = [1 << 32]  # which has 32 bits on disk
        return accepted

    async def enqueue(self, payload: bytes, count: int = 1) -> str:
        """A task with one message, enqueued as often; poison is no request."""
        request = PublishRequest(runs=[PublishRun(payloads=[payload])])
        body = b"poison" if payload == b"poison" else request.SerializeToString()
        task_id = TaskIds(0).make(self.shard.clock.now_ms())
        task = WriteTask(
            task_id=task_id,
            operation="Publish",
            created_at="2026-02-22T12:00:00.000Z",
            max_retries=self.backend.max_retries,
            payload=within_task(body),
        )
        for _ in range(count):
            await self.backend.enqueue(task)
        return task_id

    async def until(self, stored_count: int, dead_count: int = 0) -> None:
        """Wait until this many are stored, this many are dead letters, and nothing waits."""
        wanted = BackendStats(0, dead_count)
        async with asyncio.timeout(60):
            while len(await sequences(self.shard)) < stored_count:
                await asyncio.sleep(0.05)
            while await self.backend.connected.stats() != wanted:
                await asyncio.sleep(0.05)
        assert len(await sequences(self.shard)) == stored_count


@asynccontextmanager
async def consuming(
    settings: QueueSettings, root: Root, clock: ManualClock | None = None
) -> AsyncIterator[Consuming]:
    async with opened(root, clock) as shard:
        made = Consuming(settings, root, shard)
        await made.backend.connect()
        running = asyncio.create_task(made.consumer.run())
        try:
            yield made
        finally:
            running.cancel()
            await asyncio.wait([running])
            await made.backend.close()


def gated() -> tuple[Root, GatedObjects]:
    root = open_root("memory:///")
    objects = root.objects = GatedObjects(root.objects)
    return root, objects


async def test_a_task_that_comes_twice_while_it_is_applied_is_stored_once_and_completed_twice(
    backend: tuple[str, Server],
) -> None:
    root, store = gated()
    async with consuming(queue_settings(*backend), root) as made:
        # Given a task that the backend has twice, and another one behind it
        task_id = await made.enqueue(BLOB, count=2)
        await eventually(lambda: store.writes)
        behind = await made.enqueue(b"behind it")
        # Nothing else is begun while the first delivery is being applied
        await asyncio.sleep(0.2)
        assert store.writes == 1

        # When it can be stored, then it is, once, and both deliveries have their end
        store.gate.set()
        await made.until(2)
        for known in (task_id, behind):
            assert isinstance(await made.outcomes.find(known), AppliedTask)

        # And when it comes again later, then it is only completed
        await made.enqueue(b"later")
        again = WriteTask(
            task_id=task_id,
            operation="Publish",
            created_at="2026-02-22T12:00:00.000Z",
            payload={"body": "AA==", "content_length": 1},
        )
        await made.backend.enqueue(again)
        await made.enqueue(b"last")
        await made.until(4)


async def test_a_task_that_has_failed_is_not_applied_by_a_delivery_that_came_meanwhile(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, gate = asyncio.Event(), asyncio.Event()
    fail_task, dequeue_task = QueueBackend.fail_task, QueueBackend.dequeue_task
    dequeued: list[WriteTask] = []

    async def fail_behind_gate(measured: QueueBackend, task_id: str, error: str) -> bool:
        reached.set()
        await gate.wait()
        return await fail_task(measured, task_id, error)

    async def dequeue_noted(measured: QueueBackend) -> WriteTask | None:
        task = await dequeue_task(measured)
        dequeued.extend([] if task is None else [task])
        return task

    monkeypatch.setattr(QueueBackend, "fail_task", fail_behind_gate)
    monkeypatch.setattr(QueueBackend, "dequeue_task", dequeue_noted)
    settings = queue_settings(*backend, max_retries=0)
    async with consuming(settings, open_root("memory:///")) as made:
        # Given a task that the backend has twice, which fails when it comes first
        made.refusals = 1
        task_id = await made.enqueue(b"x", count=2)
        waiting = made.outcomes.wait(task_id)
        await reached.wait()
        await eventually(lambda: len(dequeued) == 2)

        # When its callers get that it failed, then the other one does not apply it
        gate.set()
        await made.until(0, dead_count=2)
        assert isinstance(await waiting, FailedTaskRecord)
        assert isinstance(await made.outcomes.find(task_id), FailedTaskRecord)


async def test_what_is_counted_of_a_task_is_its_body_in_each_form(
    backend: tuple[str, Server],
) -> None:
    root, store = gated()
    async with consuming(queue_settings(*backend), root) as made:
        await made.enqueue(BLOB)
        await eventually(lambda: store.writes)
        # As messages, and in base 64 as decoded and as it came
        assert made.consumer.held_bytes > (1 + 2 * 4 / 3) * len(BLOB)
        store.gate.set()
        await made.until(1)
        await eventually(lambda: not made.consumer.held_bytes)


async def test_a_refusal_of_one_try_is_not_kept_for_the_next(backend: tuple[str, Server]) -> None:
    root, store = gated()
    clock = ManualClock()
    async with consuming(queue_settings(*backend), root, clock) as made:
        # Given a task whose blob takes over an hour: its commit refuses it
        task_id = await made.enqueue(BLOB)
        await eventually(lambda: store.writes)
        clock.advance(UPLOAD_AGE_MS_MAX + 1)
        store.gate.set()

        # Then it is tried again, without an attempt that counts
        await made.until(1)
        assert isinstance(await made.outcomes.find(task_id), AppliedTask)
        assert made.outcomes.last_attempt(task_id) is None


async def test_a_task_that_is_refused_permanently_says_so_and_is_tried_no_more(
    backend: tuple[str, Server],
) -> None:
    root = open_root("memory:///")
    settings = queue_settings(*backend, max_retries=1, retry_delay_ms=100)
    async with consuming(settings, root) as made:
        # Given a task that no attempt can apply
        task_id = await made.enqueue(b"poison")
        await made.until(0, 1)

        # Then its error is known, and it is a dead letter while others are applied
        known = await made.outcomes.find(task_id)
        assert isinstance(known, FailedTaskRecord)
        assert (known.attempts, "is poison" in known.error) == (2, True)
        await made.enqueue(b"good")
        await made.until(1, 1)
        assert await made.outcomes.find(task_id) == known

    # And the next process knows it, too, though nothing of it waits any more
    async with consuming(settings, root) as made:
        await made.enqueue(b"good")
        await made.until(2, 1)
        assert await made.outcomes.find(task_id) == known
        assert made.consumer.is_idle


async def test_a_task_that_cannot_be_encoded_ends_processes_until_it_is_a_dead_letter(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "UNSTORABLE_END_S", WAIT_SECONDS)
    root = open_root("memory:///")
    settings = queue_settings(*backend, max_retries=1, retry_delay_ms=100)
    # Given a task that cannot be encoded, among others: two processes end by it
    good: list[str] = []
    bad = ""
    for attempt in range(2):
        async with consuming(settings, root) as made:
            if not attempt:
                good = [await made.enqueue(b"good %d" % number) for number in range(5)]
                bad = await made.enqueue(UNSTORABLE)
            await eventually(partial(made.outcomes.last_attempt, bad))
            assert isinstance(made.shard.publisher.commits.failed, Unstorable)

    # Then it is a dead letter that says why, and the others are applied
    async with consuming(settings, root) as made:
        async with asyncio.timeout(60):
            while await made.backend.connected.stats() != BackendStats(0, 1):
                await asyncio.sleep(0.05)
        (dead,) = await made.backend.connected.failed_tasks(10)
        assert "log entry" in dead.error
        for task_id in good:
            assert isinstance(await made.outcomes.find(task_id), AppliedTask)


async def test_a_read_of_a_shard_that_is_lost_costs_no_attempt(
    backend: tuple[str, Server],
) -> None:
    root = open_root("memory:///")
    settings = queue_settings(*backend, max_retries=0)
    async with consuming(settings, root) as made:
        # Given a task whose record cannot be read any more
        await made.shard.database.close()
        task_id = await made.enqueue(b"good")
        await eventually(lambda: made.shard.publisher.commits.failed)
        assert made.outcomes.last_attempt(task_id) is None

    # Then the next process applies it
    async with consuming(settings, root) as made:
        await made.until(1)


@pytest.mark.stack
@pytest.mark.proof
async def test_a_message_that_is_no_task_is_a_dead_letter_of_slatemq_and_hinders_no_task(
    tmp_path: Path,
) -> None:
    with running(SERVERS["slatemq"][1](tmp_path)) as server:
        settings = queue_settings("slatemq", server)
        prefix = f"{settings.slatemq.queue_prefix}.ingest-0"
        async with (
            slatemq.connect(settings.slatemq.endpoint) as client,
            consuming(settings, open_root("memory:///")) as made,
        ):
            # Given a message that someone else has sent to the queue of tasks
            await client.publish(b"not a task", {TASKS_HEADER: prefix})
            await made.enqueue(b"good")

            # Then it is told of among the dead letters, and the task behind it is applied
            await made.until(1, 1)
            (dead,) = await made.backend.connected.failed_tasks(10)
            assert isinstance(dead, UnreadableTask)
            assert f"of the queue {prefix}.tasks" in dead.place

            # And it stays one where tasks are retried
            assert await made.backend.connected.retry_failed_tasks() == 0
            await made.until(1, 1)
