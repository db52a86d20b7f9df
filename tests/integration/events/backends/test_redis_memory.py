"""What works on a Redis at its limit of memory, where it refuses writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count
from pathlib import Path

import pytest
from msgspec.structs import replace
from redis import asyncio as aioredis

from libs.events.backend import BackendStats
from libs.events.backends import open_backend
from libs.events.settings import RedisSettings
from libs.events.tasks import WriteTask
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event
from tests.integration.events.backends.raw_tasks import enqueue_raw
from tests.integration.events.backends.servers import Server, running
from tests.integration.events.backends.test_conformance import (
    a_task,
    created,
    eventually_stats,
)
from tests.integration.events.conftest import SERVERS, eventually, next_task
from tests.integration.waiting import hang

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture(params=["redis", "redis-lists"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    with running(SERVERS[request.param][1](tmp_path)) as started:
        yield started


@pytest.fixture
def settings(server: Server) -> RedisSettings:
    named: RedisSettings = server.settings("full")
    return replace(named, retry_delay_ms=0)


@pytest.fixture
async def client(settings: RedisSettings) -> AsyncIterator[aioredis.Redis]:
    """Redis, which evicts nothing, and has no limit yet."""
    async with aioredis.Redis.from_url(settings.url) as connected:
        await connected.config_set("maxmemory-policy", "noeviction")
        yield connected


async def test_tasks_that_fill_redis_are_drained_by_an_ingest_that_starts_then(
    client: aioredis.Redis, settings: RedisSettings
) -> None:
    # Given tasks that came while none were applied, until Redis refused more
    producer = open_backend("redis")
    await producer.connect(settings)
    used_bytes = (await client.info("memory"))["used_memory"]
    await client.config_set("maxmemory", used_bytes + (4 << 20))
    payload = {"body": "A" * 20_000}
    sent = (a_task(task_id=TaskIds(0).make(number), payload=payload) for number in count())
    tasks: list[WriteTask] = []

    async def fill() -> None:
        for task in sent:
            await producer.enqueue_task(task)
            tasks.append(task)

    with pytest.raises(Unavailable, match="maxmemory"):
        await fill()
    await producer.close()

    # When an ingest starts, then it applies and completes all of them in order
    consumer = open_backend("redis", is_sole_consumer=True)
    await consumer.connect(settings)
    for task in tasks:
        assert await next_task(consumer) == task
        await consumer.complete_task(task.task_id)
    assert await consumer.stats() == BackendStats(0, 0)
    await consumer.enqueue_task(tasks[0])
    await consumer.close()


async def test_each_end_of_a_task_works_while_redis_stays_full(
    client: aioredis.Redis, settings: RedisSettings
) -> None:
    # Given a consumer with a task that left it to others, and a Redis that stays full
    first = open_backend("redis")
    await first.connect(settings)
    left, failing = (a_task(task_id=TaskIds(0).make(number)) for number in range(2))
    await first.enqueue_task(left)
    assert await next_task(first) == left
    await first.enqueue_task(failing)
    await enqueue_raw(settings, b"not a task")
    await client.config_set("maxmemory", 1)
    await first.close()

    # When another one finishes it, and fails the next one each time
    second = open_backend("redis", is_sole_consumer=True)
    await second.connect(settings)
    assert await next_task(second) == left
    await second.complete_task(left.task_id)
    for attempts in range(failing.max_retries + 1):
        assert await next_task(second) == replace(failing, attempts=attempts)
        await second.fail_task(failing.task_id, "no room")

    # Then that one is a dead letter, as is what is not a task, and can be retried
    assert await second.dequeue_task() is None
    assert await second.stats() == BackendStats(pending_tasks=0, dead_letter_count=2)
    assert await second.retry_failed_tasks() == 1
    assert await next_task(second) == failing
    await second.complete_task(failing.task_id)
    assert await second.stats() == BackendStats(pending_tasks=0, dead_letter_count=1)
    with pytest.raises(Unavailable, match="maxmemory"):
        await second.enqueue_task(failing)
    await second.close()


@pytest.mark.parametrize("server", ["redis"], indirect=True)
async def test_a_subscriber_works_off_the_events_of_a_full_redis(
    client: aioredis.Redis, settings: RedisSettings
) -> None:
    # Given events, a poison one among them, and a Redis that stays full
    publisher, first = open_backend("redis"), open_backend("redis")
    for backend in (publisher, first):
        await backend.connect(settings)

    await first.subscribe([], hang)
    poison, *good = [created(f"{number}") for number in range(3)]
    await publisher.publish_batch([poison, *good])
    await client.config_set("maxmemory", 1)
    await first.close()

    # When a subscriber of their group, and the first of another one, start
    subscriber, other = open_backend("redis"), open_backend("redis")
    await subscriber.connect(settings)
    await other.connect(replace(settings, consumer_group="other"))
    acknowledged: list[str] = []

    async def handle(event: Event) -> None:
        if event != poison:
            await subscriber.acknowledge(event.id)
            acknowledged.append(event.id)

    await other.subscribe([], hang)
    await subscriber.subscribe([], handle)

    # Then the good ones are finished, and the other one becomes a dead letter
    await eventually(lambda: set(acknowledged) == {event.id for event in good})
    await eventually_stats(publisher, lambda stats: stats.dead_letter_count == 1)
    assert (await client.xpending("full:events", settings.consumer_group))["pending"] == 0
    with pytest.raises(Unavailable, match="maxmemory"):
        await publisher.publish(poison)
    for backend in (publisher, subscriber, other):
        await backend.close()
