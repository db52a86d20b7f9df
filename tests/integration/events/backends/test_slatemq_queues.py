"""The queues of the backend SlateMQ: what is pushed into them, and what is not there yet."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import slatemq
from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.settings import SlatemqSettings
from libs.events.slatemq import tasks as slatemq_tasks
from libs.events.slatemq.headers import EVENTS_HEADER, TASKS_HEADER
from libs.events.slatemq.tasks import Tasks
from libs.events.tasks import FailedTask, UnreadableTask, WriteTask, encode_task
from slatemq._admin.task_ids import TaskIds
from slatemq._commands import command_calls
from slatemq._consume import commands
from slatemq._consume.finishing import Finisher, Nack
from slatemq.encryption import KEY_HEADER, new_key
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event, encode_event
from tests.integration.events.backends.test_conformance import (
    Subscriber,
    a_task,
    created,
)
from tests.integration.events.conftest import Rig, eventually, next_task
from tests.integration.janitor.instances import instance
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_or_an_event_is_taken_by_its_header_alone(rig: Rig) -> None:
    """A policy permits to push to a queue those who may not publish with such headers."""
    consumer = await rig.backend()
    subscriber = Subscriber(consumer)
    await consumer.subscribe([], subscriber)
    prefix, group = rig.settings.queue_prefix, rig.settings.consumer_group
    task, event = a_task(), created("good")

    # Given a forged task and a forged event, and good ones behind them
    async with slatemq.connect(rig.settings.endpoint) as client:
        for queue, payload, header in (
            (f"{prefix}.tasks", encode_task(task), TASKS_HEADER),
            (f"{prefix}.events.{group}", encode_event(event), EVENTS_HEADER),
        ):
            await client.execute(
                [
                    slatemq.Push(queue, payload),
                    slatemq.Push(queue, payload, {header: "another"}),
                    slatemq.Push(queue, payload, {header: prefix}),
                ]
            )

    # Then the good ones alone come, and the others are dead letters
    taken: list[WriteTask] = []
    async with asyncio.timeout(60):
        while (await consumer.stats()).dead_letter_count < 4 or not taken:
            if (found := await consumer.dequeue_task()) is not None:
                taken.append(found)
                await consumer.complete_task(found.task_id)
    assert taken == [task]
    await eventually(lambda: subscriber.got)
    assert subscriber.got == [event]


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_what_has_an_unknown_key_fails_as_often_as_anything_until_its_key_is_there(
    rig: Rig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = (f"{name} {new_key()}\n" for name in ("2025", "2026"))
    for name, lines in {"old": old, "new": new, "both": new + old}.items():
        file = tmp_path / name
        file.write_text(lines)
        file.chmod(0o600)

    async def backend_with(name: str) -> QueueBackend:
        monkeypatch.setenv("SLATEMQ_ENCRYPTION_KEYS", str(tmp_path / name))
        return await rig.backend()

    # Given a task and an event with a key that is gone, a damaged task, and others behind them
    lost, good = a_task(), a_task()
    prefix, group = rig.settings.queue_prefix, rig.settings.consumer_group
    tasks, events = f"{prefix}.tasks", f"{prefix}.events.{group}"
    before = await backend_with("old")
    backend = await backend_with("new")
    subscriber = Subscriber(backend)
    await backend.subscribe([], subscriber)
    await before.enqueue_task(lost)
    await before.publish(created("lost"))
    await before.close()
    async with slatemq.connect(rig.settings.endpoint) as client:
        headers = {TASKS_HEADER: prefix, KEY_HEADER: "2026"}
        await client.execute([slatemq.Push(tasks, b"damaged", headers)])
    assert await backend.pending_tasks(10) == []
    await backend.enqueue_task(good)
    await backend.publish(created("good"))

    # Then the others come, and these are dead letters
    assert await next_task(backend) == good
    await backend.complete_task(good.task_id)
    await eventually(lambda: subscriber.got)
    assert [event.data["key"] for event in subscriber.got] == ["good"]
    async with asyncio.timeout(WAIT_SECONDS):
        while (await backend.stats()).dead_letter_count < 3:
            assert await backend.dequeue_task() is None
    (damaged, dead) = await backend.failed_tasks(10)
    assert isinstance(damaged, UnreadableTask)
    assert isinstance(dead, UnreadableTask)
    assert "no key '2025'" in dead.error
    await backend.close()

    # After all their attempts where the key may come, else at once; that alone is an error
    async with slatemq.connect(rig.settings.endpoint) as client:
        attempts_counts = [
            [entry.attempts_count async for entry in client.list_entries(queue, "failed")]
            for queue in (tasks, events)
        ]
    assert attempts_counts == [[1, 1 + rig.settings.max_retries], [1 + rig.settings.max_retries]]
    (error,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "damaged" in error.message

    # And with its key the task is retried
    whole = await backend_with("both")
    assert await whole.retry_failed_tasks() == 1
    assert await next_task(whole) == lost


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_waits_longer_than_messages_of_its_instance_do(rig: Rig) -> None:
    """What was answered is not dropped, whatever the retention of the instance."""
    backend = await rig.backend()
    waiting, dead = a_task(), a_task(max_retries=0)
    await backend.enqueue_task(dead)
    assert await next_task(backend) == dead
    await backend.fail_task(dead.task_id, "poison")
    await backend.enqueue_task(waiting)

    # Prefetched perhaps
    states = (
        slatemq.EntryState.AVAILABLE,
        slatemq.EntryState.IN_FLIGHT,
        slatemq.EntryState.FAILED,
    )
    queue, full = f"{rig.settings.queue_prefix}.tasks", slatemq.EntryView.FULL
    found: dict[bytes, slatemq.Entry] = {}
    async with slatemq.connect(rig.settings.endpoint) as client, asyncio.timeout(60):
        while len(found) < 2:
            for state in states:
                async for entry in client.list_entries(queue, state, view=full):
                    assert entry.message is not None
                    found[entry.message.payload] = entry
    assert found.keys() == {encode_task(waiting), encode_task(dead)}
    for entry in found.values():
        assert entry.message is not None
        # Over a century, and not for ever: what is done can be removed
        assert entry.message.retention_s > 100 * 366 * 86_400


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_whose_lease_has_ended_has_not_failed_and_comes_again(rig: Rig) -> None:
    backend = await rig.backend()
    task = a_task(max_retries=0)
    await backend.enqueue_task(task)
    assert await next_task(backend) == task

    # Given a lease that ends while the task is worked on
    tasks: Any = backend._tasks
    async with slatemq.connect(rig.settings.endpoint) as client:
        lease_token = tasks._held.first(task.task_id).message.lease_token
        await client.execute([slatemq.Release(lease_token)])

    # When its attempt fails, then that is no end
    assert await backend.fail_task(task.task_id, "refused") is False
    assert await next_task(backend) == task
    assert await backend.fail_task(task.task_id, "refused") is True


async def lose_lease(backend: QueueBackend, client: slatemq.Client, task: WriteTask) -> None:
    """End the lease of a task that was dequeued; it comes again."""
    tasks: Any = backend._tasks
    message = tasks._held.first(task.task_id).message
    tasks._held.drop(task.task_id)
    await client.execute([slatemq.Extend(message, 1)])


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_leases_that_end_are_no_failures_of_a_task(rig: Rig) -> None:
    backend = await rig.backend()
    task, queue = a_task(max_retries=1), f"{rig.settings.queue_prefix}.tasks"
    async with slatemq.connect(rig.settings.endpoint) as client:
        await client.update_queue(queue, backoff=slatemq.Backoff.none())

        # Given a task whose lease ends more often than it is retried
        await backend.enqueue_task(task)
        for attempts in (0, 1):
            for _ in range(2):
                assert (await next_task(backend)).attempts == attempts
                await lose_lease(backend, client, task)

            # When its attempts fail, then these count, and no others
            assert (await next_task(backend)).attempts == attempts
            assert await backend.fail_task(task.task_id, f"refused {attempts}") is True
        (dead,) = await backend.failed_tasks(10)
        assert isinstance(dead, FailedTask)
        assert (dead.task.attempts, dead.error) == (2, "refused 1")

        # And what is noted with a dead letter counts as little, nor what was before a redrive
        (entry,) = [one async for one in client.list_entries(queue, "failed")]
        await client.settle_dead_letters([slatemq.NoteDeadLetter(entry.handle, "seen")])
        (dead,) = await backend.failed_tasks(10)
        assert isinstance(dead, FailedTask)
        assert dead.task.attempts == 2
        assert await backend.retry_failed_tasks() == 1
        assert await next_task(backend) == task
        await lose_lease(backend, client, task)
        assert await next_task(backend) == task


LONG_ERROR = "e" * 1_000
LONG_RETRIES = 40
"""Attempts with this error of which a broker keeps the last thirty or so."""


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_ends_after_its_retries_however_long_its_errors_are(rig: Rig) -> None:
    backend = open_backend("slatemq")
    task = a_task(max_retries=LONG_RETRIES)
    async with AsyncExitStack() as closing:
        await backend.connect(replace(rig.settings, retry_delay_ms=0))
        closing.push_async_callback(backend.close)
        await backend.enqueue_task(task)
        for attempts in range(LONG_RETRIES + 1):
            assert (await next_task(backend)).attempts == attempts
            assert await backend.fail_task(task.task_id, LONG_ERROR) is True
        (dead,) = await backend.failed_tasks(10)
    assert isinstance(dead, FailedTask)
    assert dead.task.attempts == LONG_RETRIES + 1


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_leases_that_end_are_no_failures_of_an_event(rig: Rig) -> None:
    # Given a handler that loses more leases than an event has retries, then refuses it
    consumer, event = await rig.backend(), created("kept")
    queue = f"{rig.settings.queue_prefix}.events.{rig.settings.consumer_group}"
    deliveries: list[Event] = []

    async with slatemq.connect(rig.settings.endpoint) as client:

        async def lose(message: slatemq.Received) -> None:
            await client.execute([slatemq.Extend(message, 1)])
            while True:
                entry = await client.get_entry(message.handle)
                if (entry.state, entry.attempts_count) != ("in_flight", message.attempts_count):
                    break
                await asyncio.sleep(0.01)

        async def handle(event: Event) -> None:
            events: Any = consumer._events
            deliveries.append(event)
            if len(deliveries) <= 1 + rig.settings.max_retries:
                await lose(events._held[event.id])

        await consumer.subscribe([], handle)
        await client.update_queue(queue, backoff=slatemq.Backoff.none())
        await consumer.publish(event)

        # Then it is a dead letter after as many refusals as one whose leases never ended
        async with asyncio.timeout(WAIT_SECONDS):
            while not (await client.get_queue(queue)).counts.failed_count:
                await asyncio.sleep(0.05)
    assert deliveries == [event] * 2 * (1 + rig.settings.max_retries)


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_an_event_whose_refusal_has_no_answer_comes_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given leases that are short, where nobody keeps them
    queue = f"{rig.settings.queue_prefix}.events.{rig.settings.consumer_group}"
    async with slatemq.connect(rig.settings.endpoint) as client:
        await client.create_queue(queue, lease=1, backoff=slatemq.Backoff.none())
    backend, event = await rig.backend(), created("kept")
    subscriber = Subscriber(backend, refuse=1)
    await backend.subscribe([], subscriber)
    nack = Finisher.nack
    unanswered: list[Nack] = []

    async def nack_once(finisher: Finisher, item: Nack) -> None:
        if unanswered:
            await nack(finisher, item)
        else:
            unanswered.append(item)
            raise Unavailable("gone")

    # When a broker does not answer as an event goes back, then it comes after its lease
    monkeypatch.setattr(Finisher, "nack", nack_once)
    await backend.publish(event)
    await eventually(lambda: subscriber.got)
    assert len(unanswered) == 1


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_whose_failures_cannot_be_counted_comes_with_the_next_call(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a task that comes again
    backend, task = await rig.backend(), a_task()
    await backend.enqueue_task(task)
    assert await next_task(backend) == task
    async with slatemq.connect(rig.settings.endpoint) as client:
        await lose_lease(backend, client, task)

    # When its broker does not say what became of its attempts, then it is not lost
    async def fail(*arguments: Any, **options: Any) -> slatemq.Entry:
        raise Unavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(slatemq.Client, "get_entry", fail)
        with pytest.raises(Unavailable):
            await next_task(backend)
    assert await next_task(backend) == task


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_task_that_failed_without_an_answer_has_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = await rig.backend()
    task = a_task(max_retries=0)
    await backend.enqueue_task(task)
    assert await next_task(backend) == task

    async def lose_answer(*arguments: Any) -> list[slatemq.CommandResult]:
        await commands.execute(*arguments)
        raise Unavailable("the answer was lost")

    # Given a broker that has made it a dead letter, and whose answer was lost
    with monkeypatch.context() as patched:
        patched.setattr(command_calls, "execute", lose_answer)
        with pytest.raises(Unavailable):
            await backend.fail_task(task.task_id, "refused")

    # When that is repeated, then it is known that it is one
    assert await backend.fail_task(task.task_id, "refused") is True
    (dead,) = await backend.failed_tasks(10)
    assert isinstance(dead, FailedTask)
    assert (dead.task.task_id, dead.error) == (task.task_id, "refused")


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_a_queue_that_was_deleted_is_created_again_with_what_it_missed(rig: Rig) -> None:
    # Given a consumer and a subscriber whose queues an operator has deleted
    backend = await rig.backend()
    subscriber = Subscriber(backend)
    await backend.subscribe([], subscriber)
    assert await backend.dequeue_task() is None
    prefix, group = rig.settings.queue_prefix, rig.settings.consumer_group
    async with slatemq.connect(rig.settings.endpoint) as client:
        for queue in (f"{prefix}.tasks", f"{prefix}.events.{group}"):
            await client.delete_queue(queue)

    # When a task and an event are published then, which succeeds without a queue
    task, event = a_task(), created("kept")
    await backend.enqueue_task(task)
    await backend.publish(event)

    # Then both come
    assert await next_task(backend) == task
    await eventually(lambda: event in subscriber.got)


@pytest.mark.parametrize("server", ["slatemq"], indirect=True)
async def test_dead_letters_are_retried_as_they_are_read(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given five dead letters, of which two are read at a time
    backend = await rig.backend()
    tasks = [a_task(task_id=TaskIds(0).make(number), max_retries=0) for number in range(5)]
    for task in tasks:
        await backend.enqueue_task(task)
    for _ in tasks:
        await backend.fail_task((await next_task(backend)).task_id, "refused")
    monkeypatch.setattr(slatemq_tasks, "REDRIVEN_MAX", 2)
    redrive, read_one = Tasks._redrive, Tasks._failed_task
    read: list[str] = []
    read_counts: list[int] = []

    def read_noted(*arguments: Any) -> FailedTask | UnreadableTask:
        dead = read_one(*arguments)
        read.append(dead.name)
        return dead

    async def redrive_noted(*arguments: Any) -> int:
        read_counts.append(len(read))
        return await redrive(*arguments)

    # When they are retried, then each two go before others are read, and all come
    monkeypatch.setattr(Tasks, "_failed_task", read_noted)
    monkeypatch.setattr(Tasks, "_redrive", redrive_noted)
    assert await backend.retry_failed_tasks() == 5
    assert read_counts == [2, 4, 5]
    assert {(await next_task(backend)).task_id for _ in tasks} == {one.task_id for one in tasks}


async def test_tasks_that_no_router_has_brought_to_their_queue_are_pending(tmp_path: Path) -> None:
    task = a_task()
    async with AsyncExitStack() as closing:
        made = await closing.enter_async_context(instance(tmp_path))
        settings = SlatemqSettings(endpoint=made.brokers[0].address, queue_prefix="slatemq")

        async def opened(*, is_sole_consumer: bool) -> QueueBackend:
            backend = open_backend("slatemq", is_sole_consumer=is_sole_consumer)
            closing.push_async_callback(backend.close)
            await backend.connect(settings)
            return backend

        first = await opened(is_sole_consumer=True)
        async with asyncio.timeout(WAIT_SECONDS):
            while (await first.stats()).pending_tasks:
                await asyncio.sleep(0.05)

        # When tasks are stored while no router is there
        await made.router.kill()
        await first.enqueue_task(task)
        await first.enqueue_task(task)

        # Then they count; and the next process, which does not know of them, counts one at least
        assert (await first.stats()).pending_tasks == 2
        second = await opened(is_sole_consumer=True)
        assert (await second.stats()).pending_tasks == 1
        beside = await opened(is_sole_consumer=False)
        assert (await beside.stats()).pending_tasks == 0

        # And none does once they are routed and complete
        await made.router.start()
        completed = 0
        async with asyncio.timeout(WAIT_SECONDS):
            while completed < 2:
                assert (await second.stats()).pending_tasks
                if (found := await first.dequeue_task()) is not None:
                    await first.complete_task(found.task_id)
                    completed += 1
            for backend in (first, second):
                while (await backend.stats()).pending_tasks:
                    await asyncio.sleep(0.05)
