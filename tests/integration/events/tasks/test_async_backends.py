"""Publishes as tasks on RabbitMQ, Kafka, ActiveMQ: what holds on Redis, and what each needs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import aio_pika
import pytest

from libs.events.backends import open_backend
from libs.events.tasks import ERROR_BYTES_MAX, FailedTask, UnreadableTask
from libs.serving.telemetry import Telemetry
from libs.storage.database.roots import open_root
from libs.storage.objects.task_folders import body_name
from services.ingest.tasks.backend import TaskBackend
from services.ingest.tasks.bodies import ORPHAN_MS, TaskBodies
from services.ingest.tasks.cleanup import TaskCleanup
from services.ingest.tasks.consumer import SETTLE_MS, TaskConsumer
from services.ingest.tasks.outcomes import KEPT_MS
from slatemq.errors import FailedPrecondition, Unavailable
from slatemq.events.envelope import Event
from tests.integration.events.backends.kafka_server import TansuServer
from tests.integration.events.backends.raw_tasks import enqueue_raw
from tests.integration.events.backends.servers import Server
from tests.integration.events.conftest import SERVERS, next_task, served
from tests.integration.events.tasks.queued_ingest import (
    BACK,
    LARGE,
    beside,
    body_path,
    enqueue,
    eventually,
    names_of_shard,
    new_task_id,
    queue_settings,
    queued,
)
from tests.integration.events.tasks.test_async import (
    test_a_killed_backend_refuses_publishes_and_goes_on_when_it_is_back,
    test_a_large_body_is_an_object_until_it_is_applied,
    test_a_publish_is_answered_with_a_task_whose_messages_come,
    test_a_repeated_request_gets_the_first_ones_messages,
    test_a_task_that_comes_again_is_not_applied_again,
    test_publishes_on_a_stream_are_tasks_too,
    test_tasks_are_applied_in_the_order_of_their_answers,
)
from tests.integration.events.tasks.test_sync import (
    test_a_sync_publish_is_answered_as_a_direct_one,
    test_a_sync_publish_whose_task_fails_gets_its_error,
    test_two_ingests_on_one_backend_apply_what_each_accepted,
    test_two_ingests_share_the_tasks_of_a_client_that_knows_one,
)
from tests.integration.events.tasks.test_task_consumer import consuming
from tests.integration.events.tasks.test_task_dead_letters import (
    test_a_poison_task_is_a_dead_letter_with_its_error_until_it_is_retried,
)
from tests.integration.waiting import hang
from tests.manual_clock import ManualClock

# The same tests, with the backends of this file.
__all__ = [
    "test_a_killed_backend_refuses_publishes_and_goes_on_when_it_is_back",
    "test_a_large_body_is_an_object_until_it_is_applied",
    "test_a_poison_task_is_a_dead_letter_with_its_error_until_it_is_retried",
    "test_a_publish_is_answered_with_a_task_whose_messages_come",
    "test_a_repeated_request_gets_the_first_ones_messages",
    "test_a_sync_publish_is_answered_as_a_direct_one",
    "test_a_sync_publish_whose_task_fails_gets_its_error",
    "test_a_task_that_comes_again_is_not_applied_again",
    "test_publishes_on_a_stream_are_tasks_too",
    "test_tasks_are_applied_in_the_order_of_their_answers",
    "test_two_ingests_on_one_backend_apply_what_each_accepted",
    "test_two_ingests_share_the_tasks_of_a_client_that_knows_one",
]

pytestmark = pytest.mark.slow  # Real servers, one of which is killed and restarted.


@pytest.fixture(scope="module", params=sorted(SERVERS.keys() - {"redis", "redis-lists", "slatemq"}))
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


async def test_what_is_not_a_task_is_reported_and_hinders_no_other(
    backend: tuple[str, Server],
) -> None:
    settings = queue_settings(*backend, max_retries=0)
    async with queued(settings) as ingest:
        # Given what no ingest has made, also with an error that quotes more than a header holds,
        # and a task whose ID no ingest has made
        quoted = b'{"task_id":"%s","operation":"a","created_at":"a","payload":{}}'
        strange = [b"not JSON", b'{"another": "field"}', quoted % (b"A" * 600_000)]
        for raw in strange:
            await enqueue_raw(names_of_shard(settings), raw)
        foreign = "task_01KJ2KH1G0J9FEYRWH6ATYF8WE"
        await enqueue(settings, foreign, {"content_length": 1, "body": "AA=="})

        # When a publish comes behind them, then it is applied
        await ingest.applied(await ingest.send_task(b"behind it"))
        assert await ingest.stored() == [b"behind it"]

        # And the others are dead letters with their errors, and nowhere else
        async def are_dead() -> bool:
            return [one.task_id for one in await ingest.failed()] == ["", "", "", foreign]

        await eventually(are_dead)
        *unreadable, last = await ingest.failed()
        assert "one of its characters is wrong" in last.error
        assert all(one.error.startswith("unreadable: ") for one in unreadable)
        assert max(len(one.error) for one in unreadable) < 2 * ERROR_BYTES_MAX
        assert await ingest.retry() == 1
        await eventually(are_dead)
        async with beside(settings) as waiting:
            # A task is settled behind its dead letter

            async def nothing_waits() -> bool:
                return (await waiting.stats()).pending_tasks == 0

            await eventually(nothing_waits)


@pytest.mark.parametrize("backend", ["rabbitmq"], indirect=True)
async def test_a_task_whose_error_is_longer_than_a_header_holds_fails_with_the_beginning(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    settings = queue_settings(*backend, max_retries=0)
    async with queued(settings, tmp_path.as_uri()) as ingest:
        # Given a task that names an object by 200,000 letters
        task_id = new_task_id()
        payload: dict[str, object] = {"content_length": 4, "data_ref": "A" * 200_000}
        await enqueue(settings, task_id, payload)

        # When it fails, then its error is cut where it is reported, and the next task is applied
        await ingest.applied(await ingest.send_task(b"behind it"))

        async def is_dead() -> bool:
            return [one.task_id for one in await ingest.failed()] == [task_id]

        await eventually(is_dead)
        (dead,) = await ingest.failed()
        assert "AAA" in dead.error
        assert len(dead.error) <= ERROR_BYTES_MAX


@pytest.mark.parametrize("backend", ["rabbitmq"], indirect=True)
async def test_dead_letters_wait_where_their_queue_or_exchange_was_deleted(
    backend: tuple[str, Server],
) -> None:
    settings = queue_settings(*backend, max_retries=0)
    tasks = TaskBackend(settings, 0, Telemetry().meter)
    await tasks.connect()
    # Given a consumer that has declared all that is needed
    assert await tasks.connected.dequeue_task() is None
    dead_letters = f"{settings.rabbitmq.queue_prefix}.ingest-0.dead-letter"
    async with await aio_pika.connect(settings.rabbitmq.url) as connection:
        channel = await connection.channel()
        # When what is no task comes, and no queue takes dead letters, then it is not finished
        task_id = new_task_id()
        await enqueue_raw(names_of_shard(settings), b"not JSON")
        await enqueue(settings, task_id, {"content_length": 4, "data_ref": "any"})
        await channel.queue_delete(dead_letters)
        with pytest.raises(Unavailable):
            await next_task(tasks.connected)
        # And comes next, in front of the task
        assert await tasks.connected.dequeue_task() is None
        assert (await next_task(tasks.connected)).task_id == task_id

        # When there is no exchange for them, then the task is not finished
        await channel.exchange_delete(f"{dead_letters}s")
        with pytest.raises(Unavailable):
            await tasks.connected.fail_task(task_id, "refused")
        await tasks.connected.fail_task(task_id, "refused")

    # And both are dead letters, once
    stats = await tasks.connected.stats()
    assert (stats.pending_tasks, stats.dead_letter_count) == (0, 2)
    unreadable, failed = await tasks.connected.failed_tasks(10)
    assert isinstance(unreadable, UnreadableTask)
    assert isinstance(failed, FailedTask)
    assert failed.task.task_id == task_id
    await tasks.close()


@pytest.mark.parametrize("backend", ["rabbitmq"], indirect=True)
async def test_what_is_not_an_event_comes_again_until_a_queue_takes_it(
    backend: tuple[str, Server],
) -> None:
    # Given a subscriber, and no queue for dead letters
    settings = queue_settings(*backend).rabbitmq
    events = open_backend("rabbitmq")
    await events.connect(settings)
    await events.subscribe([], _ignore)
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        await channel.queue_delete(f"{settings.queue_prefix}.dead-letter")

        # When what is no event comes, then it is a dead letter once there is a queue again
        await channel.default_exchange.publish(
            aio_pika.Message(b"not JSON"), f"{settings.queue_prefix}.events"
        )

        async def is_there() -> bool:
            try:
                return (await events.stats()).dead_letter_count == 1
            except FailedPrecondition:  # the queue is not there yet
                return False

        await eventually(is_there, 60)
    await events.close()


async def _ignore(event: Event) -> None:
    """Acknowledge nothing."""


async def test_copies_of_a_dead_letter_are_reported_retried_and_applied_once(
    backend: tuple[str, Server], tmp_path: Path
) -> None:
    settings = queue_settings(*backend, max_retries=0)
    async with queued(settings, tmp_path.as_uri()) as ingest:
        # Given a task that fails, and that the backend has three times, as after crashes
        task_id = new_task_id()
        path = body_path(task_id)
        for _ in range(3):
            await enqueue(settings, task_id, {"content_length": 4, "data_ref": path})
        await ingest.applied(await ingest.send_task(b"behind it"))

        async def is_dead() -> bool:
            return [one.task_id for one in await ingest.failed()] == [task_id]

        await eventually(is_dead)
        # When a fourth copy finds the cause removed, then it is a dead letter no more
        await open_root(tmp_path.as_uri()).objects.put(path, BACK)
        await enqueue(settings, task_id, {"content_length": 4, "data_ref": path})
        await ingest.applied(await ingest.send_task(b"and behind that"))
        (message_id,) = await ingest.applied(task_id)
        assert await ingest.payloads(message_id) == [b"back"]
        assert await ingest.failed() == []

        # And those that are left are completed when they are retried
        assert await ingest.retry() == 1
        await ingest.applied(await ingest.send_task(b"at the end"))
        assert await ingest.retry() == 0
        assert (await ingest.stored()).count(b"back") == 1


@pytest.mark.parametrize("backend", ["rabbitmq"], indirect=True)
async def test_the_body_of_an_answered_publish_stays_though_the_backend_shows_no_task(
    backend: tuple[str, Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, root = queue_settings(*backend), tmp_path.as_uri()
    objects = open_root(root).objects

    # Given an answered publish with a large body, whose ingest has ended before it came to it
    with monkeypatch.context() as patched:
        patched.setattr(TaskConsumer, "_begin", hang)
        async with queued(settings, root) as ingest:
            task_id = await ingest.send_task(LARGE)
    zombie = TaskBackend(settings, 0, Telemetry().meter)
    (body,) = await objects.list(f"tasks/ingest-0/{zombie.place}")
    orphan = f"tasks/ingest-0/{zombie.place}/{body_name(new_task_id(), b'body')}"
    await objects.put(orphan, b"body")
    for path in (body, orphan):
        long_ago = (tmp_path / path).stat().st_mtime - ORPHAN_MS / 1000 - 1
        os.utime(tmp_path / path, (long_ago, long_ago))

    # And one that is cut off from the store, and holds the task: RabbitMQ shows it to no one
    await zombie.connect()
    async with asyncio.timeout(60):
        while (held := await zombie.connected.dequeue_task()) is None:
            pass
    assert held.task_id == task_id

    # When the next one removes what is orphaned, then the body stays, and the task finds it
    async with queued(settings, root) as ingest:

        async def is_removed() -> bool:
            return orphan not in await objects.list("tasks")

        await eventually(is_removed)
        await zombie.close()
        (message_id,) = await ingest.applied(task_id)
        assert await ingest.payloads(message_id) == [LARGE]


async def test_records_go_only_where_the_backend_has_removed_what_is_finished(
    backend: tuple[str, Server],
) -> None:
    root, clock = open_root("memory:///"), ManualClock()
    async with consuming(queue_settings(*backend), root, clock) as made:
        # Given a task that was applied a week ago, and one that was accepted now
        old = await made.enqueue(b"old")
        await made.until(1)
        clock.advance(KEPT_MS + SETTLE_MS + 1)
        new = await made.enqueue(b"new")
        await made.until(2)
        async with asyncio.timeout(60):
            while not made.consumer.finished_ms:
                await asyncio.sleep(0.01)

        # When records are swept, then the old one goes where no task is left,
        # and stays on a broker of Kafka's protocol that cannot delete
        bodies = TaskBodies(root.objects, 0, made.backend.place)
        cleanup = TaskCleanup(made.shard, made.backend, bodies, made.outcomes, made.consumer)
        is_removed = not isinstance(backend[1], TansuServer)
        assert await cleanup.sweep() == int(is_removed)
        assert (await made.outcomes.find(old) is None) == is_removed
        assert await made.outcomes.find(new) is not None
