"""Backends that stop answering while their connections stay open: a stopped process, a paused VM.

Client libraries notice it by different ways, and some end their own calls with CancelledError.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.relay import EventBatch, Relay
from libs.events.settings import QueueSettings, RedisSettings
from libs.serving.telemetry import Telemetry
from services.ingest.tasks.backend import TaskBackend
from slatemq._admin.instance import ANSWER_S
from slatemq.errors import Unavailable
from tests.integration.events.backends.servers import Server
from tests.integration.events.backends.test_conformance import a_task, created
from tests.integration.events.conftest import eventually, served
from tests.integration.events.tasks.queued_ingest import new_task_id, queue_settings

pytestmark = pytest.mark.slow  # A real server, which is silent for longer than a heartbeat.

EACH_S = 0.05


@pytest.fixture(scope="module", params=["rabbitmq", "redis"])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


class Source:
    """Has an event now and then.

    Attributes:
        position: Of the last one that is published.
    """

    def __init__(self) -> None:
        self.position = 0

    async def batches(self) -> AsyncGenerator[EventBatch, None]:
        while True:
            await asyncio.sleep(EACH_S)
            at = self.position + 1
            yield EventBatch([created(f"{at}")], at, at)

    def done(self, position: int) -> None:
        self.position = position

    def skip_to_end(self) -> int:
        return 0


class TaskFlow:
    """Tasks that are enqueued and completed, in two loops that end at no error of the backend.

    Attributes:
        refused: How often a task was refused.
        consumer_errors: How often the consumer was.
        completed: How many tasks the consumer has completed.
    """

    def __init__(self, backend: TaskBackend) -> None:
        self.refused = 0
        self.consumer_errors = 0
        self.completed = 0
        self._backend = backend

    async def enqueue(self) -> None:
        while True:
            await asyncio.sleep(EACH_S)
            try:
                await self._backend.enqueue(a_task(task_id=new_task_id()))
            except Unavailable:
                self.refused += 1

    async def consume(self) -> None:
        while True:
            self.completed += await self._backend.until_done(self._complete_one)

    async def _complete_one(self, backend: QueueBackend) -> bool:
        try:
            task = await backend.dequeue_task()
            if task is not None:
                await backend.complete_task(task.task_id)
        except Unavailable:
            self.consumer_errors += 1
            raise
        return task is not None


@asynccontextmanager
async def connected(settings: Any) -> AsyncIterator[TaskBackend]:
    backend = TaskBackend(settings, 0, Telemetry().meter)
    await backend.connect()
    try:
        yield backend
    finally:
        await backend.close()


async def test_a_relay_whose_backend_was_silent_from_the_start_says_so_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        # Given a relay that waits for a server which accepts connections, and never answers
        settings = QueueSettings(
            enabled=True,
            backend="redis",
            redis=RedisSettings(url=f"redis://127.0.0.1:{silent.getsockname()[1]}"),
        )
        relay = Relay(settings, open_backend("redis"), Source())
        running = asyncio.create_task(relay.run())

        # Then who asks is answered in time, also before anything is known of it
        async def is_up() -> bool:
            async with asyncio.timeout(ANSWER_S):
                return await relay.answers()

        assert not await is_up()
        await eventually(lambda: relay.counts.error)
        assert not await is_up()
        assert relay.counts.error.startswith("Redis cannot be reached")
        running.cancel()
        await asyncio.wait([running])


async def test_what_uses_a_backend_outlives_its_silence_and_goes_on(
    backend: tuple[str, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libs.events.rabbitmq.connection.HEARTBEAT_S", 1)
    settings = queue_settings(*backend)
    source = Source()
    relay = Relay(settings, open_backend(settings.backend), source)
    async with connected(settings) as tasks:
        # Given events, tasks, their consumer and a watch
        flow = TaskFlow(tasks)
        loops = (relay.run(), flow.enqueue(), flow.consume(), tasks.watch())
        running = [asyncio.create_task(loop) for loop in loops]

        def is_flowing(published: int, completed: int) -> bool:
            assert not any(one.done() for one in running)
            has_more = source.position > published and flow.completed > completed
            return has_more and tasks.was_connected

        def has_failed() -> bool:
            assert not any(one.done() for one in running)
            all_calls = relay.counts.failed and flow.refused and flow.consumer_errors
            return bool(all_calls) and not tasks.was_connected

        await eventually(lambda: is_flowing(0, 0))

        # When the server is silent for so long that each of them fails
        server: Any = backend[1]
        with server.frozen():
            await eventually(has_failed)

        # Then none has ended, and all go on
        before = source.position, flow.completed
        await eventually(lambda: is_flowing(*before))
        for one in running:
            one.cancel()
        await asyncio.wait(running)
