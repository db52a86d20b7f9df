"""An ActiveMQ that has no room, and so reads nothing from a connection that has sent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from libs.events.backends import open_backend
from libs.events.deliveries import end_task
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import a_task, persist
from tests.integration.events.conftest import CLASSPATH, amqp10, next_task

pytestmark = [
    pytest.mark.slow,  # A real server, whose store has to be full.
    pytest.mark.skipif(CLASSPATH not in os.environ, reason=f"no {CLASSPATH}"),
]

BODY = "x" * 100_000


async def test_what_waits_is_taken_while_the_server_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.events.activemq.connection.OPERATION_S", 2.0)
    with running(amqp10("ActivemqServer", tmp_path, is_small=True)) as server:
        # Given more tasks than are prefetched, published by one backend, until none has room
        settings = server.settings("small")
        backend = open_backend("activemq")
        await backend.connect(settings)
        tasks = [a_task(task_id=TaskIds(0).make(n), payload={"body": BODY}) for n in range(1000)]
        count = 0
        while await has_room(backend.enqueue_task(tasks[count])):
            count += 1
            if count == 1:
                assert await next_task(backend) == tasks[0]
        assert count > settings.prefetch_count

        # When it tries on and on to publish the next one
        refused = tasks[count]
        publishing = asyncio.create_task(persist(lambda: backend.enqueue_task(refused)))

        # Then tasks are taken and completed nonetheless, each once and in order
        await backend.complete_task(tasks[0].task_id)
        for task in tasks[1:count]:
            assert await next_task(backend) == task
            await backend.complete_task(task.task_id)

        # And that makes room for it
        await publishing
        assert await next_task(backend) == refused
        await end_task(publishing)
        await backend.close()


async def has_room(enqueueing: object) -> bool:
    assert asyncio.iscoroutine(enqueueing)
    try:
        await enqueueing
    except Unavailable:
        return False
    return True
