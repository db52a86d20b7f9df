"""How a backend on AMQP 1.0 counts: it has to browse its queues."""

from __future__ import annotations

import pytest

from slatemq._admin.task_ids import TaskIds
from tests.integration.events.backends.test_conformance import a_task
from tests.integration.events.conftest import SERVERS, Rig, next_task

pytest.importorskip(
    "proton", reason="requirements/activemq.txt, which takes a C compiler, is not installed"
)

from libs.events.activemq.tasks import COUNTED_BYTES_MAX

pytestmark = pytest.mark.slow  # A real server.

BODY = "x" * 700_000
"""As long as the longest body that travels in a task."""


@pytest.mark.parametrize(
    "server", [name for name, (kind, _) in SERVERS.items() if kind == "activemq"], indirect=True
)
async def test_a_count_ends_amid_a_backlog_of_large_tasks_and_takes_none_of_them(rig: Rig) -> None:
    # Given more tasks than a count reads
    producer, consumer = await rig.backend(), await rig.backend()
    tasks = [a_task(task_id=TaskIds(0).make(n), payload={"body": BODY}) for n in range(40)]
    for task in tasks:
        await producer.enqueue_task(task)

    # Then as many are counted as it reads, time and again
    for _ in range(3):
        stats = await producer.stats()
        assert COUNTED_BYTES_MAX // len(BODY) <= stats.pending_tasks <= len(tasks)
        assert stats.dead_letter_count == 0

    # And all of them come, each once
    taken: list[str] = []
    for _ in tasks:
        taken.append((await next_task(consumer)).task_id)
        await consumer.complete_task(taken[-1])
    assert sorted(taken) == [task.task_id for task in tasks]
    assert (await producer.stats()).pending_tasks == 0
    assert await consumer.dequeue_task() is None
