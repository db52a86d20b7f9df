"""Backends that are closed while they connect or subscribe, and calls that wait to connect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any, cast

import aio_pika
import pytest

from libs.events.backend import EventCarrier, QueueBackend, TaskCarrier
from libs.events.deliveries import Handler
from libs.events.kafka.tasks import Tasks
from libs.events.rabbitmq import connection as rabbitmq
from libs.events.settings import ActivemqSettings, KafkaSettings, RabbitmqSettings
from slatemq.errors import Unavailable
from tests.unit.events.kafka_in_memory import Broker, BrokerConnection


class Gate:
    """Holds those that pass it.

    Attributes:
        passes: How many have come.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()

    async def hold(self) -> None:
        self.passes += 1
        self.reached.set()
        await self.opened.wait()


# --- Subscriptions ------------------------------------------------------------


class Carrier:
    """Events of a server whose subscriptions take long."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.stops = 0
        self.delivered = 0

    async def start(self, types: frozenset[str]) -> None:
        await self.gate.hold()

    async def deliver(
        self, types: frozenset[str], handler: Handler, note_up: Callable[[], None]
    ) -> None:
        self.delivered += 1
        await asyncio.Event().wait()

    async def stop(self) -> None:
        self.stops += 1


class Slow(QueueBackend):
    """A backend of these events."""

    NAME = "Slow"
    _translated = cast("Callable[[], AbstractContextManager[None]]", staticmethod(nullcontext))

    def __init__(self) -> None:
        super().__init__()
        self.carrier = Carrier()

    async def open(self, config: Any) -> None:
        carrier = self.carrier = Carrier()
        self._compose(cast("EventCarrier", carrier), cast("TaskCarrier", carrier))

    async def disconnect(self) -> None: ...

    async def ping(self) -> None: ...


async def test_a_subscription_that_begins_as_its_backend_is_closed_delivers_nothing() -> None:
    async def handle(event: Any) -> None:
        raise AssertionError("it was closed")

    # Given a backend that is closed before its subscription is there
    backend = Slow()
    await backend.connect(None)
    carrier = backend.carrier
    subscribing = asyncio.create_task(backend.subscribe([], handle))
    await carrier.gate.reached.wait()
    await backend.close()
    carrier.gate.opened.set()

    # Then the call says so, and nothing of it is left, also when the backend is connected again
    with pytest.raises(Unavailable, match="closed"):
        await subscribing
    assert carrier.stops == 2  # Of the tasks, and of the subscription
    await backend.connect(None)
    backend.carrier.gate.opened.set()
    await backend.subscribe([], handle)
    await asyncio.sleep(0)
    assert (carrier.delivered, backend.carrier.delivered) == (0, 1)
    await backend.close()


# --- Connections --------------------------------------------------------------


class Made:
    """A connection to RabbitMQ that was made; nothing is sent by it."""

    def __init__(self) -> None:
        self.connected = asyncio.Event()
        self.connected.set()
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


async def test_a_connection_to_rabbitmq_that_comes_as_it_is_closed_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, made = Gate(), Made()

    async def connect(*args: Any, **options: Any) -> Made:
        await gate.hold()
        return made

    monkeypatch.setattr(aio_pika, "connect", connect)
    connection = rabbitmq.Connections(RabbitmqSettings()).consuming
    opening = asyncio.create_task(connection.open_channel())
    await gate.reached.wait()
    await connection.close()
    gate.opened.set()
    with pytest.raises(ConnectionError):
        await opening
    assert made.is_closed


async def test_a_connection_to_activemq_that_comes_as_it_is_closed_is_closed_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("proton", reason="requirements/activemq.txt is not installed")
    from libs.events.activemq.connection import Connection
    from libs.events.activemq.engine import ConnectionLost

    gate, made = Gate(), Made()

    async def connect() -> Made:
        await gate.hold()
        return made

    connection = Connection(ActivemqSettings())
    monkeypatch.setattr(connection, "_open", connect)
    opening = asyncio.create_task(connection.engine())
    await gate.reached.wait()
    await connection.close()
    gate.opened.set()
    with pytest.raises(ConnectionLost):
        await opening
    assert made.is_closed
    with pytest.raises(ConnectionLost):
        await connection.engine()
    assert gate.passes == 1


async def test_a_consumer_of_kafka_that_starts_as_it_is_stopped_is_stopped_too() -> None:
    gate, stops = Gate(), Gate()
    stops.opened.set()

    class Starting(BrokerConnection):
        def consumer(self, group: str, **options: Any) -> Any:
            consumer = super().consumer(group, **options)
            consumer.start, consumer.stop = gate.hold, stops.hold
            return consumer

    settings = KafkaSettings(brokers=("in memory",), topic_prefix="t", partitions=1)
    tasks = Tasks(Starting(settings, Broker()), is_sole_consumer=True)
    starting = asyncio.create_task(tasks.dequeue())
    await gate.reached.wait()
    await tasks.stop()
    gate.opened.set()
    with pytest.raises(Unavailable, match="closed"):
        await starting
    assert stops.passes == 1


# --- Servers that stand still -------------------------------------------------

CALLS = 8


@asynccontextmanager
async def standing_still() -> AsyncIterator[tuple[int, list[asyncio.StreamWriter]]]:
    """The port of a server that accepts connections and says nothing, and those it has accepted."""
    accepted: list[asyncio.StreamWriter] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1], accepted
        for writer in accepted:
            writer.transport.abort()


async def check_together(call: Callable[[], Awaitable[Any]]) -> None:
    results = await asyncio.gather(*(call() for _ in range(CALLS)), return_exceptions=True)
    assert [type(one) for one in results] == [TimeoutError] * CALLS


async def test_calls_to_a_rabbitmq_that_stands_still_wait_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rabbitmq, "OPERATION_S", 0.5)
    async with standing_still() as (port, accepted):
        settings = RabbitmqSettings(url=f"amqp://127.0.0.1:{port}/")
        connection = rabbitmq.Connections(settings).publishing
        await check_together(connection.shared_channel)
        assert len(accepted) < CALLS


async def test_calls_to_an_activemq_that_stands_still_wait_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("proton", reason="requirements/activemq.txt is not installed")
    from libs.events.activemq import connection as activemq

    monkeypatch.setattr(activemq, "OPERATION_S", 0.5)
    async with standing_still() as (port, accepted):
        settings = ActivemqSettings(url=f"amqp://127.0.0.1:{port}")
        await check_together(activemq.Connection(settings).engine)
        assert len(accepted) < CALLS
