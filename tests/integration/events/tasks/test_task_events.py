"""What tasks have stored has its events, by the same relay as in write-through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from libs.events.backends import open_backend
from libs.events.settings import Consistency, QueueSettings
from slatemq.events.envelope import Event
from slatemq.v1 import events_pb2, events_pb2_grpc
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.conftest import eventually
from tests.integration.events.tasks.queued_ingest import LARGE, QueuedIngest, queue_settings, queued
from tests.integration.ingest.server import message
from tests.integration.waiting import hang

pytestmark = pytest.mark.slow  # A real server.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running(RedisServer(tmp_path, "streams")) as started:
        yield started


@asynccontextmanager
async def recorded(settings: QueueSettings) -> AsyncIterator[list[Event]]:
    """All events that the backend delivers."""
    got: list[Event] = []
    backend = open_backend(settings.backend)

    async def record(event: Event) -> None:
        got.append(event)
        await backend.acknowledge(event.id)

    await backend.connect(getattr(settings, settings.backend))
    await backend.subscribe([], record)
    yield got
    await backend.close()


async def status(ingest: QueuedIngest) -> events_pb2.GetEventsStatusResponse:
    stub: Any = events_pb2_grpc.EventsServiceStub(ingest.channel)
    answer: events_pb2.GetEventsStatusResponse = await stub.GetEventsStatus(
        events_pb2.GetEventsStatusRequest(), timeout=30
    )
    return answer


@pytest.mark.parametrize("consistency", ["async", "sync"])
async def test_each_message_of_an_applied_task_has_its_event(
    server: RedisServer, consistency: Consistency
) -> None:
    settings = queue_settings("redis", server, consistency)
    async with recorded(settings) as got, queued(settings) as ingest:
        # When publishes are applied as tasks
        ids: list[int] = []
        for n in range(3):
            body = LARGE if n == 1 else b"small"
            answer = await ingest.enqueue(message(body, queue="orders"), message(b"%d" % n))
            ids += await ingest.applied(answer.task_id) if answer.task_id else answer.message_ids

        # Then each of their messages has its event, in the order of the log
        await eventually(lambda: len(got) >= len(ids))
        assert [int(event.data["message_id"]) for event in got] == ids
        assert {event.type for event in got} == {"message.published"}
        assert got[2].data["size"] == len(LARGE)
        assert got[2].data["headers"] == {"queue": "orders"}
        result = await status(ingest)
        assert (result.consistency, result.published_count, result.lag_count) == (consistency, 6, 0)


async def test_what_was_applied_before_a_restart_has_its_events_after_it(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = queue_settings("redis", server)
    root = (tmp_path / "data").as_uri()
    async with recorded(settings) as got:
        # Given an ingest that ends before it has published an event
        with monkeypatch.context() as patching:
            patching.setattr("libs.events.relay.Relay._publish", hang)
            async with queued(settings, root) as ingest:
                ids = await ingest.applied(await ingest.send_task(b"x"))
        assert got == []

        # Then the next one does, once
        async with queued(settings, root) as ingest:
            ids += await ingest.applied(await ingest.send_task(b"y"))
            await eventually(lambda: len(got) >= 2)
        assert [int(event.data["message_id"]) for event in got] == ids
