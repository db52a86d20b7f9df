"""The connection to ActiveMQ: opened when it is used, and what its errors mean."""

from __future__ import annotations

import asyncio
import ssl
import uuid
from collections.abc import Awaitable, Iterator, Set
from contextlib import contextmanager
from string import Formatter
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from proton import Link, Message, ProtonException

from libs.events.activemq.engine import ConnectionLost, Engine, IdBrowser, Receiver, Refused
from libs.events.cancellations import keeping_cancellations
from libs.events.deliveries import group_of
from libs.events.settings import NO_URL, ActivemqSettings
from libs.events.tls_faults import TlsFault, find_tls_fault
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable

T = TypeVar("T")

OPERATION_S = 10.0
"""How long one call may take, connecting included."""

HELLO = b"AMQP\x03\x01\x00\x00"

PORTS = {"amqp": 5672, "amqps": 5671}


@contextmanager
def translated() -> Iterator[None]:
    """Raises Unavailable for a server that is down, FailedPrecondition for what it refuses.

    Of these the engine raises TooLarge itself.
    """
    try:
        with keeping_cancellations():
            yield
    except Refused as error:
        raise FailedPrecondition("REFUSED", f"ActiveMQ refuses it: {error}") from error
    except (ConnectionLost, ProtonException, OSError, TimeoutError) as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"ActiveMQ cannot be reached: {what}", reason="BACKEND_DOWN") from error


class Addresses:
    """What the topic and the queues are called, in the forms of the settings."""

    def __init__(self, settings: ActivemqSettings) -> None:
        """Addresses of these settings. Raises InvalidArgument that names the key."""
        prefix, group = settings.queue_prefix, settings.consumer_group
        if "." in group:
            raise InvalidArgument(
                "queue.activemq.consumer_group",
                "must have no dots: ActiveMQ takes the group from one part of a queue's name",
            )
        self._settings = settings
        self.events = _formed("events_address", settings, name=f"{prefix}.events")
        self.group = self.group_of(frozenset())
        self.tasks = _formed("queue_address", settings, name=f"{prefix}.tasks")
        self.retry = _formed("queue_address", settings, name=f"{prefix}.tasks.retry")
        self.dead = _formed("queue_address", settings, name=f"{prefix}.dead-letter")

    def group_of(self, types: Set[str]) -> str:
        """The queue of subscribers with these types."""
        settings = self._settings
        group = group_of(settings.consumer_group, types)
        name = f"{settings.queue_prefix}.events"
        return _formed("group_address", settings, name=name, group=group)


def _formed(key: str, settings: ActivemqSettings, **values: str) -> str:
    template: str = getattr(settings, key)
    try:
        fields = {field for _, field, _, _ in Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise InvalidArgument(f"queue.activemq.{key}", str(error)) from error
    if fields != set(values):
        wanted = " and ".join(f"{{{value}}}" for value in sorted(values))
        raise InvalidArgument(f"queue.activemq.{key}", f"must contain {wanted}, and no other field")
    return template.format(**values)


class Connection:
    """One connection, opened again when it was lost."""

    def __init__(self, settings: ActivemqSettings) -> None:
        """Nothing is opened yet. Raises InvalidArgument that names the key."""
        try:
            url = urlsplit(settings.url)
            port = url.port
        except ValueError:
            raise InvalidArgument("queue.activemq.url", NO_URL) from None
        if url.scheme not in PORTS or not url.hostname:
            raise InvalidArgument("queue.activemq.url", "must be amqp://HOST or amqps://HOST")
        if url.path not in ("", "/") or url.query or url.fragment:
            raise InvalidArgument("queue.activemq.url", "must end with the host and the port")
        self._host = url.hostname
        self._port = port or PORTS[url.scheme]
        self._context = ssl.create_default_context() if url.scheme == "amqps" else None
        self._user = unquote(url.username) if url.username else None
        self._password = unquote(url.password) if url.password else None
        self._engine: Engine | None = None
        self._senders: dict[str, Link] = {}
        self._opening = asyncio.Lock()
        self._closed = asyncio.Event()

    async def engine(self) -> Engine:
        """The open connection. Raises OSError, TimeoutError, and the engine's errors.

        Calls that wait for it wait together: for as long as one of them may take.
        """
        async with asyncio.timeout(OPERATION_S), self._opening:
            if self._closed.is_set():
                raise ConnectionLost("it was closed")
            if self._engine is None or self._engine.is_lost:
                self._senders.clear()
                engine = await self._open()
                if self._closed.is_set():  # meanwhile: `close` could not see this one
                    await engine.close()
                    raise ConnectionLost("it was closed")
                self._engine = engine
            return self._engine

    async def _open(self) -> Engine:
        name = f"slatemq-{uuid.uuid4().hex}"
        engine = Engine(self._user, self._password, self._host, name)
        try:
            async with asyncio.timeout(OPERATION_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: engine, self._host, self._port, ssl=self._context
                )
                await engine.opened()
        except BaseException:
            engine.abort(ConnectionLost("it was not opened"))
            raise
        return engine

    async def find_tls_fault(self) -> TlsFault | None:
        """As the function of that name."""
        return await find_tls_fault(self._host, self._port, self._context, HELLO)

    async def send(self, address: str, *messages: Message) -> None:
        """Send in order; returns once the server has accepted all of them.

        A server that does not answer in time loses the connection: a message that it may still get
        must not come after a later one.
        """
        engine = await self.engine()
        try:
            async with asyncio.timeout(OPERATION_S):
                sender = await self._sender(engine, address)
                sent = [engine.transfer(sender, message) for message in messages]
                results = await asyncio.gather(*sent, return_exceptions=True)
        except TimeoutError as error:
            engine.abort(error)
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _sender(self, engine: Engine, address: str) -> Link:
        async with self._opening:
            sender = self._senders.get(address)
            if sender is None or self._engine is not engine:
                sender = await engine.open_sender(address)
                if self._engine is engine:
                    self._senders[address] = sender
            return sender

    async def open_sender(self, address: str) -> None:
        """Open what `send` needs. Raises as `engine`."""
        engine = await self.engine()
        await self._opened(engine, self._sender(engine, address))

    async def receive(self, address: str, browse: bool = False) -> Receiver:
        engine = await self.engine()
        return await self._opened(engine, engine.open_receiver(address, browse))

    async def browse_ids(self, address: str) -> IdBrowser:
        engine = await self.engine()
        return await self._opened(engine, engine.open_id_browser(address))

    async def _opened(self, engine: Engine, opening: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout(OPERATION_S):
                return await opening
        except TimeoutError as error:
            engine.abort(error)
            raise

    async def close(self) -> None:
        """Close it; what was not accepted goes back to its queues."""
        self._closed.set()
        if self._engine is not None:
            await self._engine.close()


class Connections:
    """The connections of one backend: one for what it sends, one for all else.

    ActiveMQ reads no more from a connection that has sent what it has no room for. By the other one
    tasks and events are taken and accepted nonetheless, which makes room.
    """

    def __init__(self, settings: ActivemqSettings) -> None:
        """Nothing is opened yet. Raises InvalidArgument that names the key."""
        self.settings = settings
        self.addresses = Addresses(settings)
        self._sending = Connection(settings)
        self._receiving = Connection(settings)

    async def send(self, address: str, *messages: Message) -> None:
        """As of Connection."""
        await self._sending.send(address, *messages)

    async def receive(self, address: str, browse: bool = False) -> Receiver:
        return await self._receiving.receive(address, browse)

    async def browse_ids(self, address: str) -> IdBrowser:
        return await self._receiving.browse_ids(address)

    async def prepare(self) -> None:
        """Open what is sent to: ActiveMQ creates what is missing.

        Raises InvalidArgument that names the key of a refused address.
        """
        async with asyncio.timeout(OPERATION_S):
            for key, address in (
                ("events_address", self.addresses.events),
                ("queue_address", self.addresses.tasks),
                ("queue_address", self.addresses.retry),
                ("queue_address", self.addresses.dead),
            ):
                try:
                    await self._sending.open_sender(address)
                except Refused as error:
                    if error.is_login:
                        raise
                    raise InvalidArgument(f"queue.activemq.{key}", str(error)) from error

    async def ping(self) -> None:
        """Return once both have answered, which one that is blocked does not."""
        for connection in (self._receiving, self._sending):
            receiver = await connection.receive(self.addresses.dead, browse=True)
            await receiver.close()

    async def find_tls_fault(self) -> TlsFault | None:
        """As the function of that name."""
        return await self._sending.find_tls_fault()

    async def close(self) -> None:
        """Close both, as Connection does."""
        try:
            await self._receiving.close()
        finally:
            await self._sending.close()


def message_of(body: bytes, message_id: str, **properties: Any) -> Message:
    return Message(
        body=body,
        inferred=True,
        durable=True,
        id=message_id,
        content_type="application/json",
        properties=properties or None,
    )
