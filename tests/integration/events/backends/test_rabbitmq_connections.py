"""Connections to RabbitMQ: encrypted ones, and one that breaks while events go by it together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aio_pika
import msgspec
import pytest
from aio_pika import Channel, IncomingMessage

from libs.events.backend import BackendStats
from libs.events.backends import open_backend
from libs.events.rabbitmq.connection import Connections
from libs.events.tasks import MOVED_MAX
from slatemq._admin.task_ids import TaskIds
from slatemq.errors import Unavailable
from slatemq.events.envelope import Event
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.test_conformance import (
    Subscriber,
    a_task,
    created,
    eventually_stats,
    persist,
)
from tests.integration.events.conftest import eventually, next_task
from tests.integration.waiting import hang

pytestmark = pytest.mark.slow  # A real server.

EACH_S = 0.01
EVENTS = 60
KEY = "k" * 20_000
"""Events so large that a batch is written in many pieces."""


class Proxy:
    """Forwards connections to a port; breaks those whose time has come.

    Attributes:
        port: Where it listens.
        connections: How many were accepted.
        bytes_left: After how many bytes of clients all connections break, once; None: never.
        refusals: How many of the next connections are closed at once.
        is_slow: Whether what servers send comes in small pieces, with pauses.
    """

    def __init__(self, target: int) -> None:
        self.port = 0
        self.connections = 0
        self.bytes_left: int | None = None
        self.refusals = 0
        self.is_slow = False
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[Proxy]:
        async with await asyncio.start_server(self._accept, "127.0.0.1", 0) as listener:
            self.port = listener.sockets[0].getsockname()[1]
            yield self
            self.break_all()

    def break_all(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refusals:
            self.refusals -= 1
            writer.transport.abort()
            return
        back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        both = {writer, forth}
        self._writers |= both
        try:
            with suppress(OSError):
                await asyncio.gather(
                    self._forward(reader, forth, self._spend),
                    self._forward(back, writer, self._wait),
                )
        finally:
            self._writers -= both
            for one in both:
                one.transport.abort()

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        admit: Callable[[bytes], Awaitable[None]],
    ) -> None:
        while data := await reader.read(256 if self.is_slow else 4096):
            await admit(data)
            writer.write(data)
            await writer.drain()
        writer.transport.abort()

    async def _wait(self, data: bytes) -> None:
        if self.is_slow:
            await asyncio.sleep(EACH_S)

    async def _spend(self, data: bytes) -> None:
        if self.bytes_left is not None:
            self.bytes_left -= len(data)
            if self.bytes_left < 0:
                self.bytes_left = None
                self.break_all()


def break_amid_the_batch(proxy: Proxy) -> None:
    proxy.bytes_left = EVENTS * len(KEY) // 3


def break_before_the_batch_and_refuse_once(proxy: Proxy) -> None:
    proxy.break_all()
    proxy.refusals = 1


@pytest.mark.parametrize("do_break", [break_amid_the_batch, break_before_the_batch_and_refuse_once])
async def test_no_event_of_a_batch_overtakes_one_whose_connection_broke(
    rabbitmq: RabbitmqServer, do_break: Callable[[Proxy], None]
) -> None:
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    events = [created(f"{KEY}{number}") for number in range(EVENTS)]
    async with Proxy(rabbitmq.port).listening() as proxy:
        # Given a subscriber, and a publisher whose connection can be broken
        consumer, publisher = open_backend("rabbitmq"), open_backend("rabbitmq")
        await consumer.connect(settings)
        url = settings.url.replace(str(rabbitmq.port), str(proxy.port))
        await publisher.connect(msgspec.structs.replace(settings, url=url))
        subscriber = Subscriber(consumer)
        await consumer.subscribe([], subscriber)
        await publisher.publish(created("before"))
        connections = proxy.connections

        # When it breaks, then the batch is refused, and can be published again
        do_break(proxy)
        await asyncio.sleep(0.2)  # Most often noticed by now: either way the order holds.
        with pytest.raises(Unavailable):
            await publisher.publish_batch(events)
        await persist(lambda: publisher.publish_batch(events))
        assert proxy.connections > connections
        await eventually(lambda: events[-1] in subscriber.got)

        # And the events came in their order, but for what came twice
        first_came: dict[str, Event] = {}
        for event in subscriber.got[1:]:
            first_came.setdefault(event.id, event)
        assert list(first_came.values()) == events
        for backend in (publisher, consumer):
            await backend.close()


async def test_amqps_connects_by_tls_to_a_server_whose_certificate_is_trusted(
    rabbitmq: RabbitmqServer,
) -> None:
    assert rabbitmq.certificate is not None
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    url = f"amqps://guest:guest@127.0.0.1:{rabbitmq.tls_port}/"
    trusting = open_backend("rabbitmq")
    await trusting.connect(
        msgspec.structs.replace(settings, url=f"{url}?cafile={rabbitmq.certificate.file}")
    )
    task = a_task()
    await trusting.enqueue_task(task)
    assert await next_task(trusting) == task
    await trusting.complete_task(task.task_id)
    await trusting.close()


async def test_dead_letters_that_come_slowly_all_move_back(
    rabbitmq: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    async with Proxy(rabbitmq.port).listening() as proxy:
        # Given dead letters, each of which takes longer to come than a consumer waits for it
        backend = open_backend("rabbitmq")
        url = settings.url.replace(str(rabbitmq.port), str(proxy.port))
        await backend.connect(msgspec.structs.replace(settings, url=url))
        tasks = [a_task(task_id=TaskIds(0).make(n), max_retries=0) for n in range(MOVED_MAX + 1)]
        for task in tasks:
            await backend.enqueue_task(task)
            assert await backend.fail_task((await next_task(backend)).task_id, "no room")
        monkeypatch.setattr("libs.events.rabbitmq.connection.WAIT_S", EACH_S / 10)
        proxy.is_slow = True

        # When they are retried, then none stays behind
        assert await backend.retry_failed_tasks() == len(tasks)
        proxy.is_slow = False
        await backend.close()


async def test_a_task_whose_ack_hangs_is_completed_by_the_next_call(
    rabbitmq: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    task = a_task()
    await backend.enqueue_task(task)
    assert await next_task(backend) == task

    # When an ack hangs, as on a connection that was lost, then the call ends with an error
    with monkeypatch.context() as patched:
        patched.setattr("libs.events.rabbitmq.connection.OPERATION_S", 0.2)
        patched.setattr(IncomingMessage, "ack", hang)
        with pytest.raises(Unavailable):
            await backend.complete_task(task.task_id)

    # And the next call completes the task
    await backend.complete_task(task.task_id)
    await eventually_stats(backend, lambda stats: stats == BackendStats(0, 0))
    await backend.close()


@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("declare_queue", lambda backend: backend.stats()),
        ("get_queue", lambda backend: backend.failed_tasks(1)),
        ("get_queue", lambda backend: backend.retry_failed_tasks()),
    ],
)
async def test_a_call_that_a_starting_server_never_answers_ends(
    rabbitmq: RabbitmqServer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    call: Callable[[Any], Awaitable[object]],
) -> None:
    backend = open_backend("rabbitmq")
    await backend.connect(rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}"))
    # When nothing answers on a connection that stays open, then the call ends with an error
    with monkeypatch.context() as patched:
        patched.setattr("libs.events.rabbitmq.tasks.OPERATION_S", 0.2)
        patched.setattr(Channel, method, hang)
        with pytest.raises(Unavailable):
            await call(backend)

    # And the next one succeeds
    assert await call(backend) in (BackendStats(0, 0), [], 0)
    await backend.close()


async def test_a_dead_letter_whose_connection_is_given_up_is_tried_again(
    rabbitmq: RabbitmqServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = rabbitmq.settings(f"t{uuid.uuid4().hex[:8]}")
    backend = open_backend("rabbitmq")
    await backend.connect(settings)
    await backend.subscribe([], Subscriber(backend))
    gave_up, publish = False, Connections.publish

    async def give_up_once(*arguments: Any, **named: Any) -> None:
        nonlocal gave_up
        if not gave_up:
            gave_up = True
            raise asyncio.CancelledError  # as aiormq ends the calls of a silent connection
        await publish(*arguments, **named)

    monkeypatch.setattr(Connections, "publish", give_up_once)

    # When another program sends what is not an event, and its dead letter is not published at first
    async with await aio_pika.connect(settings.url) as connection:
        channel = await connection.channel()
        exchange = await channel.get_exchange(settings.exchange)
        await exchange.publish(aio_pika.Message(b"not JSON"), "object.created")

    # Then it comes again, and becomes one
    await eventually_stats(backend, lambda stats: stats.dead_letter_count == 1)
    assert gave_up
    await backend.close()
