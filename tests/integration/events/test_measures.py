"""The six metrics of a backend, and its health, on a real server that is killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.watch import BackendWatch, QueueHealth
from libs.serving.http.server import Exposition
from libs.serving.telemetry import configure
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event
from slatemq.models import now_ms
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.backends.test_conformance import a_task, created
from tests.integration.events.conftest import eventually
from tests.integration.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow  # A real server, whose redeliveries take their delays.


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running(RedisServer(tmp_path, "streams")) as server:
        yield server


class Measures:
    """What `GET /metrics` says."""

    def __init__(self) -> None:
        self.exposition = Exposition()
        self.telemetry = configure("ingest", "ingest-0", readers=[self.exposition.reader])

    def __getitem__(self, name: str) -> dict[str, float]:
        """Values of a metric, by kind and operation where it has them."""
        text = self.exposition.render(self.telemetry.series).decode()
        return {
            " ".join(re.findall(r'slatemq_queue_(?:kind|operation)="(\w+)"', labels)): float(value)
            for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
        }


async def connected(
    redis: RedisServer, measures: Measures, clock: list[float]
) -> tuple[QueueBackend, BackendWatch]:
    meter = measures.telemetry.meter
    backend = open_backend("redis", meter)
    await backend.connect(redis.settings("t"))
    return backend, BackendWatch(backend, "redis", meter, lambda: clock[0])


async def found(watch: BackendWatch, clock: list[float]) -> QueueHealth:
    """The health, once the server has answered a look in time."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not (health := await watch.health()).connected:
            clock[0] += 10
    return health


async def test_each_metric_of_the_design_counts_what_it_says(redis: RedisServer) -> None:
    measures, clock = Measures(), [0.0]
    backend, watch = await connected(redis, measures, clock)
    try:
        # Then all counters are there before there is anything to count
        publishes = {"event publish": 0.0, "task publish": 0.0}
        consumes = {"event consume": 0.0, "task consume": 0.0}
        assert measures["slatemq_queue_published_total"] == publishes
        assert measures["slatemq_queue_consumed_total"] == consumes
        assert measures["slatemq_queue_failed_total"] == {**publishes, **consumes}

        # Given two events, of which a handler refuses one once
        refused: list[str] = []
        finished: list[str] = []

        async def handler(event: Event) -> None:
            if event.data["key"] == "bad" and not refused:
                refused.append(event.id)
                raise RuntimeError("refused")
            await backend.acknowledge(event.id)
            finished.append(event.id)

        await backend.subscribe([], handler)
        await backend.publish_batch([created("good"), created("bad")])
        await eventually(lambda: len(finished) == 2)

        # And three tasks: one is done, one fails until it is a dead letter, one waits
        for retries in (2, 0, 2):
            task_id = TaskIds(0).make(now_ms())
            await backend.enqueue_task(a_task(task_id=task_id, max_retries=retries))
        for _ in range(2):
            task = None
            while task is None:
                task = await backend.dequeue_task()
            if task.max_retries:
                await backend.complete_task(task.task_id)
            else:
                await backend.fail_task(task.task_id, "poison")
        health = await found(watch, clock)

        # Then the metrics say so, under their names
        assert health == QueueHealth("redis", True, 1, 1)
        assert measures["slatemq_queue_published_total"] == {
            "event publish": 2.0,
            "task publish": 3.0,
        }
        assert measures["slatemq_queue_consumed_total"] == {
            "event consume": 2.0,
            "task consume": 1.0,
        }
        assert measures["slatemq_queue_failed_total"] == {
            **publishes,
            "event consume": 1.0,
            "task consume": 1.0,
        }
        assert list(measures["slatemq_queue_pending"].values()) == [1.0]
        assert list(measures["slatemq_queue_dead_letter"].values()) == [1.0]
        assert measures["slatemq_queue_latency_ms_count"] == {
            "event publish": 2.0,
            "task publish": 3.0,
            "event consume": 2.0,
            "task consume": 1.0,
        }
        # And events of last year took that long
        assert measures["slatemq_queue_latency_ms_sum"]["event consume"] > 1_000

    finally:
        await backend.close()
        measures.telemetry.shutdown()


async def test_a_killed_server_is_known_to_be_away_and_to_be_back(redis: RedisServer) -> None:
    # Given a backend with a task
    measures, clock = Measures(), [0.0]
    backend, watch = await connected(redis, measures, clock)
    try:
        await backend.enqueue_task(a_task(task_id=TaskIds(0).make(now_ms())))
        health = await found(watch, clock)
        assert health == QueueHealth("redis", True, 1, 0)

        # When the server is killed, that is known once a second has passed
        redis.kill()
        assert await watch.health() == health, "asked more than once a second"
        clock[0] += 10
        assert await watch.health() == QueueHealth("redis", False)

        # And what fails is counted
        with pytest.raises(Unavailable):
            await backend.publish(created("lost"))
        assert measures["slatemq_queue_failed_total"]["event publish"] == 1.0

        # When it is back, that is known, too
        redis.start()
        clock[0] += 10
        assert await found(watch, clock) == health
    finally:
        await backend.close()
        measures.telemetry.shutdown()
