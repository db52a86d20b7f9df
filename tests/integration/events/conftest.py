"""Backends on real servers: one server of a kind for the whole file, one RabbitMQ for all files."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libs.events.backend import QueueBackend
from libs.events.backends import open_backend
from libs.events.deliveries import group_of
from libs.events.settings import RabbitmqSettings
from libs.events.tasks import WriteTask
from tests import timed_uvloop
from tests.integration.events.backends.kafka_server import kafka_server
from tests.integration.events.backends.rabbitmq_server import RabbitmqServer
from tests.integration.events.backends.redis_server import RedisServer
from tests.integration.events.backends.servers import Certificate, PreparedServer, Server, running
from tests.integration.events.backends.slatemq_server import SlatemqServer
from tests.integration.waiting import WAIT_SECONDS

CLASSPATH = "ACTIVEMQ_CLASSPATH"
"""Variable with the jars of ActiveMQ 5 and its AMQP connector, which Debian's package lacks."""


def amqp10(kind: str, folder: Any, **options: bool) -> Server:
    """A server of AMQP 1.0, where its client is installed: see requirements/activemq.txt."""
    pytest.importorskip(
        "proton", reason="requirements/activemq.txt, which takes a C compiler, is not installed"
    )
    servers = import_module("tests.integration.events.backends.activemq_server")
    server: Server = getattr(servers, kind)(folder, **options)
    return server


SERVERS: dict[str, tuple[str, Callable[[Any], Server]]] = {
    "redis": ("redis", lambda folder: RedisServer(folder, "streams")),
    "kafka": ("kafka", kafka_server),
    "slatemq": ("slatemq", SlatemqServer),
    "rabbitmq": ("rabbitmq", RabbitmqServer),
    "redis-lists": ("redis", lambda folder: RedisServer(folder, "lists")),
    "amqp-1.0": ("activemq", lambda folder: amqp10("Amqp10Server", folder)),
}
"""Name of the backend, and its server, by the name of the test's variant."""

if CLASSPATH in os.environ:
    SERVERS["activemq"] = ("activemq", lambda folder: amqp10("ActivemqServer", folder))

EVENTUALLY_S = WAIT_SECONDS


class Rig:
    """Makes backends whose names nothing else uses.

    Attributes:
        server: Where they connect to.
        name: Of the kind of backend, as in the settings.
    """

    def __init__(self, backend: str, server: Server, closing: AsyncExitStack) -> None:
        self.server = server
        self.name = backend
        self._prefix = f"t{uuid.uuid4().hex[:8]}"
        self._closing = closing

    @property
    def settings(self) -> Any:
        """The settings of the group `workers`."""
        return self.server.settings(self._prefix)

    async def backend(self, group: str = "workers", types: Collection[str] = ()) -> QueueBackend:
        """A connected backend in a consumer group, which may subscribe to these types."""
        settings = self.settings
        if group != "workers":
            settings = in_group(settings, f"{self._prefix}-{group}")
        if isinstance(self.server, PreparedServer):
            own = group_of(settings.consumer_group, frozenset(types))
            self.server.prepare(in_group(settings, own))
        return await self._connected(open_backend(self.name), settings)

    async def sole_consumer(self, settings: Any) -> QueueBackend:
        """A connected backend of an ingest, which shares its tasks with no other consumer."""
        if isinstance(self.server, PreparedServer):
            self.server.prepare(settings)
        return await self._connected(open_backend(self.name, is_sole_consumer=True), settings)

    async def _connected(self, backend: QueueBackend, settings: Any) -> QueueBackend:
        await backend.connect(settings)
        self._closing.push_async_callback(backend.close)
        return backend


def in_group(settings: Any, group: str) -> Any:
    """The settings of another consumer group on the same events."""
    key = "queue_prefix" if isinstance(settings, RabbitmqSettings) else "consumer_group"
    return msgspec.structs.replace(settings, **{key: group})


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Services run on uvloop, whose transports and errors are not those of asyncio."""
    return {"uvloop": timed_uvloop.Loop}


@pytest.fixture(scope="session")
def rabbitmq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RabbitmqServer]:
    """Speaks TLS, too. The files that have it go together: see tests.side_by_side."""
    folder = tmp_path_factory.mktemp("rabbitmq")
    with running(RabbitmqServer(folder, certificate=Certificate(folder))) as started:
        yield started


def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """For fixtures with names of SERVERS as parameters: the backend's name, and its server."""
    backend, make = SERVERS[request.param]
    if request.param == "rabbitmq":
        yield backend, request.getfixturevalue("rabbitmq")
        return
    with running(make(tmp_path_factory.mktemp(request.param))) as started:
        yield backend, started


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    yield from served(request, tmp_path_factory)


@pytest.fixture(scope="module", params=["redis", "redis-lists"])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Server]]:
    """A backend of tasks: its name in the settings, and its server."""
    yield from served(request, tmp_path_factory)


@pytest.fixture
async def rig(server: tuple[str, Server]) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as closing:
        yield Rig(*server, closing)


async def eventually(come_about: Callable[[], object], seconds: float = EVENTUALLY_S) -> None:
    """Wait until something has come about."""
    async with asyncio.timeout(seconds):
        while not come_about():
            await asyncio.sleep(0.02)


async def next_task(backend: QueueBackend) -> WriteTask:
    async with asyncio.timeout(EVENTUALLY_S):
        while (task := await backend.dequeue_task()) is None:
            pass
    return task


FOLDER = Path(__file__).parent

SHORT_FORMS = (
    "test_events_come_whole_and_in_order",
    "test_a_publish_is_answered_with_a_task_whose_messages_come",
)
"""What `make test` tries on Kafka, where each group takes seconds to form."""

LONG_FORMS = (
    "test_a_killed_backend_refuses_publishes_and_goes_on_when_it_is_back[rabbitmq]",
    "test_a_killed_server_keeps_what_was_answered_and_comes_back_by_itself[rabbitmq]",
    "test_a_killed_server_keeps_what_was_answered_and_comes_back_by_itself[slatemq]",
)
"""What it does not try on others: RabbitMQ and a whole stack take long to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # pytest gives the items of other folders too.
    for item in items:
        if not item.path.is_relative_to(FOLDER):
            continue
        is_long = item.name.endswith("[kafka]") and not item.name.startswith(SHORT_FORMS)
        if is_long or item.name in LONG_FORMS:
            item.add_marker(pytest.mark.proof)
