"""Tasks in Redis whose ends, or whose hand-over, are lost on the way."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from redis import asyncio as aioredis
from redis import exceptions

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.redis.backend import RedisBackend
from libs.events.redis.dead_letters import DeadLetters
from libs.events.redis.gathered import GatheredCommands
from libs.events.tasks import FailedTask, WriteTask
from slatemq.errors import Unavailable
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.backends.test_conformance import a_task
from tests.integration.events.conftest import SERVERS

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture(params=["redis", "redis-lists"])
def server(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[Server]:
    with running(SERVERS[request.param][1](tmp_path)) as started:
        yield started


async def dequeued(backend: QueueBackend[Any]) -> WriteTask:
    async with asyncio.timeout(30):
        while (task := await backend.dequeue_task()) is None:
            pass
    return task


async def test_a_task_is_completed_by_the_call_that_repeats_one_in_an_outage(
    server: Server,
) -> None:
    backend = open_backend("redis")
    await backend.connect(server.settings("once"))
    task = a_task()
    await backend.enqueue_task(task)
    await dequeued(backend)
    await asyncio.to_thread(server.kill)
    with pytest.raises(Unavailable):
        await backend.complete_task(task.task_id)
    await asyncio.to_thread(server.start)
    await backend.complete_task(task.task_id)
    assert (await backend.stats()).pending_tasks == 0
    await backend.close()


async def test_a_sole_consumer_takes_at_once_what_the_one_before_it_had(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("consumer_group", "list_tasks"):
        monkeypatch.setattr(f"libs.events.redis.{module}.HOLD_MS", 3_600_000)
    killed = RedisBackend(is_sole_consumer=True)
    await killed.connect(server.settings("sole"))
    tasks = [a_task() for _ in range(35)]
    for task in tasks:
        await killed.enqueue_task(task)
    taken = [await dequeued(killed) for _ in range(25)]
    assert len({task.task_id for task in taken}) == 25
    await killed.disconnect()

    successor = open_backend("redis", is_sole_consumer=True)
    await successor.connect(server.settings("sole"))
    again = [await dequeued(successor) for _ in tasks]
    assert {task.task_id for task in again} == {task.task_id for task in tasks}
    for task in again:
        await successor.complete_task(task.task_id)
    assert (await successor.stats()).pending_tasks == 0
    await successor.close()


async def test_a_list_of_dead_letters_does_not_hold_their_bodies(server: Server) -> None:
    settings = server.settings("bodies")
    body = "A" * (700 << 10)
    async with aioredis.from_url(settings.url) as client:
        letters = DeadLetters(client, settings.stream_prefix)
        tasks = [replace(a_task(), payload={"body": body}) for _ in range(64)]
        for task in tasks:
            async with client.pipeline() as pipeline:
                letters.add_task(pipeline, task, "no room")
                await pipeline.execute()
        tracemalloc.start()
        try:
            found = await letters.tasks(1_000)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert [one.task.task_id for one in found if isinstance(one, FailedTask)] == [
        task.task_id for task in tasks
    ]
    assert peak_bytes < len(tasks) * len(body)


async def test_each_delivery_of_a_task_has_its_own_end(server: Server) -> None:
    backend = open_backend("redis")
    await backend.connect(server.settings("twice"))
    task = a_task()
    for _ in range(2):
        await backend.enqueue_task(task)
    assert [await dequeued(backend) for _ in range(2)] == [task, task]
    for left in (1, 0):
        await backend.complete_task(task.task_id)
        assert (await backend.stats()).pending_tasks == left
    await backend.close()


async def test_a_task_whose_move_was_never_heard_of_comes_again(tmp_path: Any) -> None:
    with running(SERVERS["redis-lists"][1](tmp_path)) as server:
        backend = open_backend("redis")
        settings = server.settings("moved")
        await backend.connect(settings)
        held, lost = a_task(), a_task()
        await backend.enqueue_task(held)
        assert await dequeued(backend) == held
        # Given a task that the server has moved for this consumer, whose answer was lost
        await backend.enqueue_task(lost)
        async with aioredis.Redis.from_url(settings.url) as client:
            key = "moved:tasks"
            (processing,) = [one async for one in client.scan_iter(f"{key}:processing:*")]
            assert await client.lmove(key, processing, "LEFT", "RIGHT")
        # Then it comes again, and the one that is held does not
        assert await dequeued(backend) == lost
        for task in (held, lost):
            await backend.complete_task(task.task_id)
        assert (await backend.stats()).pending_tasks == 0
        await backend.close()


async def test_what_comes_at_once_is_sent_together_and_each_caller_has_its_own_answer(
    tmp_path: Any,
) -> None:
    with running(SERVERS["redis"][1](tmp_path)) as server:
        client = aioredis.Redis.from_url(server.settings("any").url)
        await client.set("text", "is no stream")
        gathered = GatheredCommands(client, transaction=False)

        # When a hundred come at once, of which one is refused
        keys = ["text" if number == 50 else "stream" for number in range(100)]
        answers = await asyncio.gather(
            *(gathered.execute(partial(_append, key)) for key in keys), return_exceptions=True
        )

        # Then that one's caller alone hears of it, and few connections were opened
        assert [type(answer) for answer in answers if answer is not None] == [
            exceptions.ResponseError
        ]
        assert isinstance(answers[50], exceptions.ResponseError)
        assert await client.xlen("stream") == 99
        assert (await client.info("clients"))["connected_clients"] <= 2

        # And a connection that is lost is told to all who share it, then made again
        await asyncio.to_thread(server.kill)
        lost = await asyncio.gather(
            *(gathered.execute(partial(_append, "stream")) for _ in range(10)),
            return_exceptions=True,
        )
        assert all(isinstance(error, exceptions.ConnectionError) for error in lost)
        await asyncio.to_thread(server.start)
        await gathered.execute(partial(_append, "stream"))
        assert await client.xlen("stream") == 100
        await client.aclose()


def _append(key: str, pipeline: Any) -> None:
    pipeline.xadd(key, {"data": "x"})
