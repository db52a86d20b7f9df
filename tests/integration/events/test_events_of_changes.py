"""Each change that a caller can make, as an event on Redis: of the whole stack, and after kills."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
import pytest
import redis.asyncio
import yaml

import slatemq
from slatemq.events.catalogue import CATALOGUE
from slatemq.events.envelope import Event, decode_event
from slatemq.v1 import queue_pb2, queue_pb2_grpc
from tests.acceptance.local_stack import LocalStack
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import running
from tests.integration.events.conftest import EVENTUALLY_S
from tests.integration.stack.processes import Service

pytestmark = pytest.mark.slow  # A whole stack, and Redis.

ALREADY_EXISTS = grpc.StatusCode.ALREADY_EXISTS
NOT_FOUND = grpc.StatusCode.NOT_FOUND
OURS = {name for name in CATALOGUE if name.startswith(("queue.", "message.", "janitor."))}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with running(RedisServer(folder, "streams")) as started:
        yield started


@pytest.fixture
def config(tmp_path: Path, server: RedisServer) -> Path:
    """A file with the settings of event queues."""
    file = tmp_path / "slatemq.yaml"
    section = msgspec.to_builtins(server.settings("all"))
    queue = {"enabled": True, "backend": "redis", "redis": section}
    file.write_text(yaml.safe_dump({"queue": queue}))
    return file


@pytest.fixture
def stack(tmp_path: Path, config: Path) -> Iterator[LocalStack]:
    folder = tmp_path / "stack"
    arguments = ("--data", str(folder / "data"), "--config", str(config))
    with LocalStack(folder, *arguments, ready=True) as started:
        yield started


async def events_on(server: RedisServer) -> list[Event]:
    """What is in the stream, each event where it came first."""
    async with redis.asyncio.Redis(port=server.port) as client:
        entries = await client.xrange("all:events")
    events = [decode_event(fields[b"data"]) for _, fields in entries]
    first: dict[str, Event] = {}
    for event in events:
        assert first.setdefault(event.id, event) == event
    return list(first.values())


async def seen(server: RedisServer, wanted: set[tuple[str, str]]) -> list[Event]:
    """The events, once these are among them: types, and what they are about."""
    async with asyncio.timeout(EVENTUALLY_S):
        while True:
            events = await events_on(server)
            missing = wanted - {(event.type, about(event)) for event in events}
            if not missing:
                return events
            await asyncio.sleep(0.1)


def about(event: Event) -> str:
    data = event.data
    return str(data.get("queue") or data.get("job") or data["headers"].get("queue"))


async def change_all(client: slatemq.Client) -> None:
    """Each change that has an event, on the queue `orders`."""
    await client.create_queue("orders", max_attempts=1)
    await client.update_queue("orders", lease=20)
    await client.pause_queue("orders")
    await client.resume_queue("orders")
    late = datetime.now(UTC) + timedelta(minutes=10)
    await client.publish_many(
        [
            slatemq.OutgoingMessage(
                b"x", {"queue": "orders"}, visible_at_ms=int(late.timestamp() * 1000)
            )
            for _ in range(2)
        ]
    )
    await client.publish(b"bad", {"queue": "orders"})
    [claimed] = await client.claim("orders", wait=60)
    await client.nack([claimed.lease_token], reason="broken")
    redrive = await client.start_redrive("orders")
    await client.wait_redrive(redrive, every=0.05)
    waiting: list[slatemq.Entry] = []
    async with asyncio.timeout(EVENTUALLY_S):
        while len(waiting) < 2:
            found = client.list_entries("orders", slatemq.EntryState.DELAYED)
            waiting = [entry async for entry in found]
    first, second = waiting
    await client.edit_message(first.handle, payload=b"edited")
    await client.reschedule_entry(first.handle, late + timedelta(minutes=1))
    await client.cancel_entry(second.handle)
    await client.purge_queue("orders", [slatemq.EntryState.AVAILABLE])
    run = await client.run_job("report", days=1)
    async with asyncio.timeout(EVENTUALLY_S):
        async for one in client.watch_job_run(run):
            if one.state is not slatemq.JobRunState.WAITING:
                break
    await client.cancel_job_run(run)
    await client.wait_job_run(run)
    await client.delete_queue("orders")


async def test_every_change_is_an_event_and_those_made_while_redis_is_down_outlive_kills(
    server: RedisServer, stack: LocalStack
) -> None:
    async with slatemq.connect(stack.endpoint) as client:
        await change_all(client)
        about_queue = {(name, "orders") for name in OURS if not name.startswith("janitor.")}
        about_runs = {(name, "report") for name in OURS if name.startswith("janitor.")}
        events = await seen(server, about_queue | about_runs)
        sources = {event.type.partition(".")[0]: event.source for event in events}
        assert sources.keys() == {"queue", "message", "janitor"}
        assert {event.source for event in events} == {"ingest-0", "broker-0", "janitor-0"}
        async with asyncio.timeout(EVENTUALLY_S):
            stood = await client.events_status()
            while not all(one.answering for one in stood):
                await asyncio.sleep(0.1)
                stood = await client.events_status()
        assert {one.service for one in stood} == {"ingest", "broker", "janitor"}

        await asyncio.to_thread(server.kill)
        for name in ("a", "b"):
            await client.create_queue(name)
        await client.pause_queue("a")
        killed = stack.signal("broker", signal.SIGKILL)
        await asyncio.to_thread(stack.wait_restarted, "broker", killed)
        await client.resume_queue("a")

        async def broker_lag() -> int:
            found = await client.events_status()
            return sum(one.lag_count for one in found if one.service == "broker")

        async with asyncio.timeout(EVENTUALLY_S):
            while await broker_lag() < 4:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(server.start)
        wanted = [("created", "a"), ("created", "b"), ("paused", "a"), ("resumed", "a")]
        after = await seen(server, {(f"queue.{what}", name) for what, name in wanted})

    order = [(event.type, about(event)) for event in after if about(event) in ("a", "b")]
    assert order == [(f"queue.{what}", name) for what, name in wanted]


LIFE = ("created", "paused", "resumed", "deleted")
"""What becomes of each queue of a Maker."""


class Maker:
    """Makes queues and deletes them, each change until it is answered, through kills."""

    def __init__(self, broker: Service) -> None:
        self.answered: list[tuple[str, str]] = []
        self._broker = broker
        self._stopping = False

    async def run(self, name: int) -> None:
        stub: Any = queue_pb2_grpc.QueueServiceStub(self._broker.there)
        for n in range(1_000_000):
            queue_id = f"q-{name}-{n}"
            calls: tuple[tuple[Any, Any], ...] = (
                (
                    stub.CreateQueue,
                    queue_pb2.CreateQueueRequest(queue=queue_pb2.Queue(queue_id=queue_id)),
                ),
                (stub.PauseQueue, queue_pb2.PauseQueueRequest(queue_id=queue_id)),
                (stub.ResumeQueue, queue_pb2.ResumeQueueRequest(queue_id=queue_id)),
                (stub.DeleteQueue, queue_pb2.DeleteQueueRequest(queue_id=queue_id)),
            )
            for what, (call, request) in zip(LIFE, calls, strict=True):
                if self._stopping:
                    return
                await self._until_done(call, request)
                self.answered.append((f"queue.{what}", queue_id))

    async def _until_done(self, call: Any, request: Any) -> None:
        while True:
            try:
                await call(request, timeout=10)
            except grpc.aio.AioRpcError as error:
                if error.code() in (ALREADY_EXISTS, NOT_FOUND):
                    return  # An earlier try did it.
                await asyncio.sleep(0.02)
            else:
                return

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self.run(name)) for name in range(4)]
        try:
            yield
        finally:
            self._stopping = True
            await asyncio.gather(*tasks)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.proof)])
async def test_each_answered_change_has_one_event_in_order_whatever_is_killed_when(
    tmp_path: Path,
    server: RedisServer,
    config: Path,
    kills: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLATEMQ_CONFIG", str(config))
    broker = Service(tmp_path, "broker")
    maker = Maker(broker)
    try:
        await broker.start()
        async with maker.running():
            for n in range(kills):
                await asyncio.sleep(random.uniform(0.2, 0.8))
                if n % 2:
                    await asyncio.to_thread(server.kill)
                await broker.kill()
                await broker.start()
                if n % 2:
                    await eventually_more(maker)
                    await asyncio.to_thread(server.start)
            await eventually_more(maker)
        found = await seen(server, set(maker.answered))
    finally:
        await broker.close()

    by_queue: dict[str, list[str]] = {}
    for event in found:
        by_queue.setdefault(about(event), []).append(event.type)
    assert all(
        life == [f"queue.{what}" for what in LIFE][: len(life)] for life in by_queue.values()
    )


async def eventually_more(maker: Maker) -> None:
    """Wait until more changes are answered."""
    before = len(maker.answered)
    async with asyncio.timeout(EVENTUALLY_S):
        while len(maker.answered) <= before:
            await asyncio.sleep(0.02)
