"""A RabbitMQ that lacks disk space, and so reads nothing from connections that publish."""

from __future__ import annotations

import uuid

import pytest

from libs.events.backend import BackendStats
from libs.events.backends import open_backend
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.test_conformance import (
    Subscriber,
    a_task,
    created,
    eventually_stats,
    persist,
    until_healthy,
)
from tests.integration.events.conftest import eventually, next_task

pytestmark = pytest.mark.slow  # A real server, whose alarm has to be noticed.

TASKS = 30
"""More than are prefetched: they all come only if acks of the first ones are read."""


async def test_what_waits_is_taken_during_an_alarm_and_what_failed_comes_again_once_after_it(
    rabbitmq: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.events.rabbitmq.connection.OPERATION_S", 2.0)
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    assert settings.prefetch_count < TASKS
    backend = open_backend("rabbitmq")
    await backend.connect(settings)

    # Given tasks, the first of which will fail, and events, all published by this very backend
    subscriber = Subscriber(backend)
    tasks = [a_task(task_id=TaskIds(0).make(n)) for n in range(TASKS)]
    for task in tasks:
        await backend.enqueue_task(task)
    poison = await next_task(backend)
    assert poison == tasks[0]
    await backend.subscribe([], subscriber)

    # When an alarm refuses publishes
    with rabbitmq.disk_alarm():
        refused = a_task(task_id=TaskIds(0).make(TASKS))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await backend.enqueue_task(refused)
        with pytest.raises(Unavailable, match="blocks publishers"):
            await backend.publish(created("refused"))
        assert not await backend.health_check()

        # Then tasks are taken and completed, and one that fails is held until it can be moved
        for task in tasks[1:]:
            assert await next_task(backend) == task
            await backend.complete_task(task.task_id)
        for _ in range(2):
            with pytest.raises(Unavailable, match="blocks publishers"):
                await backend.fail_task(poison.task_id, "no room")
        assert (await backend.stats()).pending_tasks == 1

    # And after the alarm it comes again, once, behind what was written as the alarm began
    await until_healthy(backend)
    assert await backend.fail_task(poison.task_id, "no room")
    assert await next_task(backend) == refused
    await backend.complete_task(refused.task_id)
    again = await next_task(backend)
    assert (again.task_id, again.attempts) == (poison.task_id, 1)
    await backend.complete_task(again.task_id)
    await eventually_stats(backend, lambda stats: stats == BackendStats(0, 0))
    assert await backend.dequeue_task() is None

    event = created("later")
    await persist(lambda: backend.publish(event))
    await eventually(lambda: event in subscriber.got)
    assert [one.data["key"] for one in subscriber.got] == ["later"]
    await backend.close()
