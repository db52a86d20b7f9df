"""The connections to RabbitMQ: opened when they are used, and what their errors mean."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import aio_pika
from aio_pika import exceptions
from aio_pika.abc import (
    AbstractChannel,
    AbstractConnection,
    AbstractExchange,
    AbstractIncomingMessage,
    AbstractQueue,
)
from aiormq.exceptions import ChannelAccessRefused

from libs.events.cancellations import keeping_cancellations
from libs.events.rabbitmq.address import Address
from libs.events.refusals import TooLarge, bytes_max_by
from libs.events.settings import RabbitmqSettings
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable

OPERATION_S = 10.0
"""How long one call may take, connecting included."""

HEARTBEAT_S = 10
"""After three of these and 3 s without a sign of life a connection counts as lost."""

DELIVERIES_MAX: Final = 2**31 - 1
"""Deliveries after which a quorum queue drops a message: RabbitMQ 4 does after 20 by default, and
each one that a crash of ours or a look at the dead letters ended counts."""

log = logging.getLogger(__name__)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """False for aiormq's line about a try to connect: it raises that, too, and callers log it."""
    return record.msg != "error when creating transport: %r"


logging.getLogger("aiormq.connection").addFilter(_is_worth_a_line)

REFUSALS = (
    ChannelAccessRefused,
    exceptions.ChannelPreconditionFailed,
    exceptions.ChannelNotFoundEntity,
    exceptions.ProbableAuthenticationError,
    exceptions.AuthenticationError,
)


@contextmanager
def translated() -> Iterator[None]:
    """Raises Unavailable for a server that is down, FailedPrecondition for what it refuses.

    Of these TooLarge for what has too many bytes.
    """
    try:
        with keeping_cancellations():
            yield
    except REFUSALS as error:
        login = isinstance(
            error, exceptions.ProbableAuthenticationError | exceptions.AuthenticationError
        )
        # Only the reason says what the values of that error are.
        is_mechanism = isinstance(error, exceptions.AuthenticationError)
        why = error.reason % error.args if is_mechanism else str(error)
        bytes_max = bytes_max_by(why)
        if bytes_max is not None:
            raise TooLarge(f"RabbitMQ refuses it: {why}", bytes_max) from error
        raise FailedPrecondition(
            "LOGIN" if login else "REFUSED", f"RabbitMQ refuses it: {why}"
        ) from error
    except (exceptions.AMQPError, *exceptions.CONNECTION_EXCEPTIONS, TimeoutError) as error:
        what = str(error) or type(error).__name__
        raise Unavailable(f"RabbitMQ cannot be reached: {what}", reason="BACKEND_DOWN") from error


class Connection:
    """One connection, opened again when it was lost."""

    def __init__(self, address: Address) -> None:
        """Nothing is opened yet."""
        self._address = address
        self._connection: AbstractConnection | None = None
        self._shared: AbstractChannel | None = None
        self._closed = asyncio.Event()
        self._opening = asyncio.Lock()
        self._choosing = asyncio.Lock()

    async def open_channel(self, prefetch_count: int = 0) -> AbstractChannel:
        """A channel with publisher confirms. Raises aio-pika's errors.

        Calls that wait for the connection wait together: for as long as one of them may take.
        """
        async with asyncio.timeout(OPERATION_S), self._opening:
            connection = await self._connect()
            try:
                # A message that no queue took is confirmed, too: it raises, as if refused.
                channel = await connection.channel(publisher_confirms=True, on_return_raises=True)
                if prefetch_count:
                    await channel.set_qos(prefetch_count=prefetch_count)
            except Exception as error:
                if self._closed.is_set():  # aiormq may say so by an error without a type or a text
                    raise ConnectionError("it was closed") from error
                raise
            return channel

    async def _connect(self) -> AbstractConnection:
        if self._closed.is_set():
            raise ConnectionError("it was closed")
        # `is_closed` of it stays False when the server ended the connection.
        if self._connection is None or not self._is_connected:
            self._shared = None
            connection = await aio_pika.connect(
                self._address.url,
                ssl_context=self._address.context,
                heartbeat=HEARTBEAT_S,
                timeout=OPERATION_S,
            )
            if self._closed.is_set():  # meanwhile: `close` could not see this one
                await connection.close()
                raise ConnectionError("it was closed")
            self._connection = connection
        return self._connection

    async def shared_channel(self) -> AbstractChannel:
        """The channel of calls that need none of their own.

        Raises Unavailable while RabbitMQ blocks the connection: what were sent then would be stored
        later, though its call had failed.
        """
        async with asyncio.timeout(OPERATION_S), self._choosing:  # one opens it, not all at once
            channel = self._shared
            if channel is None or channel.is_closed or not self._is_connected:
                channel = await self.open_channel()
                self._shared = channel
        await self._wait_unblocked()
        return channel

    async def _wait_unblocked(self) -> None:
        transport = None if self._connection is None else self._connection.transport
        if transport is None:
            return  # It was closed meanwhile, and the channel with it.
        try:
            async with asyncio.timeout(OPERATION_S):
                await transport.ready()
        except TimeoutError as error:
            why = "RabbitMQ blocks publishers: it lacks memory or disk space"
            raise Unavailable(why, reason="BACKEND_DOWN") from error

    @property
    def _is_connected(self) -> bool:
        return self._connection is not None and self._connection.connected.is_set()

    def deliveries(self, channel: AbstractChannel) -> Deliveries:
        """What is delivered by a channel that was opened just now."""
        assert self._connection is not None
        return Deliveries(channel, self._connection.connected)

    async def close(self) -> None:
        """Close it; what was not acknowledged goes back to its queues. Raises as `acknowledge`."""
        self._closed.set()
        if self._connection is not None and not self._connection.is_closed:
            async with asyncio.timeout(OPERATION_S):
                await self._connection.close()


class Connections:
    """The connections of one backend: one for publishes, one for all else.

    At a memory or disk alarm RabbitMQ reads no more from a connection that publishes. By the other
    one tasks and events are taken and acknowledged nonetheless, which may be what ends the alarm.

    Attributes:
        subscribed: The queues of events from which this backend takes some.
    """

    def __init__(self, settings: RabbitmqSettings) -> None:
        """Nothing is opened yet. Raises InvalidArgument that names the key."""
        self.settings = settings
        self.address = Address.of(settings.url)
        self.publishing = Connection(self.address)
        self.consuming = Connection(self.address)
        self.subscribed: set[str] = set()
        self._declaring = asyncio.Lock()
        self._declared_s = -math.inf

    async def publish(
        self,
        exchange: str,
        routing_key: str,
        message: aio_pika.Message,
        *,
        is_kept: bool,
        channel: AbstractChannel | None = None,
    ) -> None:
        """Publish, and wait for the confirm; by this channel, or the one of the moment.

        `is_kept`: it raises where no queue takes the message. It always does without the exchange.
        What is missing is then declared, so that a later try finds it.
        """
        channel = channel or await self.publishing.shared_channel()
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(OPERATION_S):
                target: AbstractExchange = (
                    await channel.get_exchange(exchange, ensure=False)
                    if exchange
                    else channel.default_exchange
                )
                await target.publish(message, routing_key, mandatory=is_kept)
        except exceptions.PublishError:
            await self._declare_again("queue", routing_key, began_s)
            raise
        except exceptions.ChannelNotFoundEntity:
            await self._declare_again("exchange", exchange, began_s)
            raise

    async def _declare_again(self, kind: str, name: str, missed_s: float) -> None:
        """Declare all, unless that began after the publish which missed it."""
        async with self._declaring:  # Many may miss it at once.
            if self._declared_s < missed_s:
                self._declared_s = time.monotonic()
                log.error("RabbitMQ has lost the %s %r, declaring it again", kind, name)
                await self.declare_all()

    async def declare_all(self) -> None:
        """As the function of that name, with the queues in which refused events wait.

        By the consuming connection: as a batch of publishes misses its exchange, aiormq goes on to
        write to the channel that the server has closed, which ends their connection.
        """
        channel = await self.consuming.open_channel()
        await declare_all(channel, self.settings)
        for queue in self.subscribed:
            await declare_retry(channel, queue, self.settings)
        await close_channel(channel)

    async def ping(self) -> None:
        """Return once both have answered, which one that is blocked does not."""
        for connection in (self.consuming, self.publishing):
            await close_channel(await connection.open_channel())

    async def close(self) -> None:
        """Close both, as Connection does."""
        try:
            await self.consuming.close()
        finally:
            await self.publishing.close()


def message_of(body: bytes, settings: RabbitmqSettings, **properties: Any) -> aio_pika.Message:
    """A message that is as durable as the settings say."""
    mode = (
        aio_pika.DeliveryMode.PERSISTENT
        if settings.durable
        else (aio_pika.DeliveryMode.NOT_PERSISTENT)
    )
    return aio_pika.Message(body, content_type="application/json", delivery_mode=mode, **properties)


async def acknowledge(message: AbstractIncomingMessage) -> None:
    """Raises TimeoutError: an ack on a connection that was lost may never return."""
    async with asyncio.timeout(OPERATION_S):
        await message.ack()


async def close_channel(channel: AbstractChannel) -> None:
    """Close a channel, unless it is closed; raises as `acknowledge`."""
    if not channel.is_closed:
        async with asyncio.timeout(OPERATION_S):
            await channel.close()


class Names:
    """What the exchanges and queues are called."""

    def __init__(self, settings: RabbitmqSettings) -> None:
        self.exchange = settings.exchange
        self.events = f"{settings.queue_prefix}.events"
        self.tasks = f"{settings.queue_prefix}.tasks"
        self.retry = retry_of(self.tasks)
        self.dead = f"{settings.queue_prefix}.dead-letter"
        # Instances may share the exchange of events, but no dead letters. Queues of others may be
        # bound to an exchange of the name above: once it was `EXCHANGE.dead-letter`.
        self.dead_exchange = f"{settings.queue_prefix}.dead-letters"


async def declare_all(channel: AbstractChannel, settings: RabbitmqSettings) -> None:
    """Create the exchanges and queues that are missing.

    Raises InvalidArgument that names the key where the server has one with other properties.
    """
    names = Names(settings)
    if names.exchange == names.dead_exchange:  # its queue would get every event
        raise InvalidArgument("queue.rabbitmq.exchange", "is the exchange of dead letters")
    kind = aio_pika.ExchangeType(settings.exchange_type)
    exchange = channel.declare_exchange(names.exchange, kind, durable=settings.durable)
    await _declare(exchange, "exchange", "exchange_type")
    fanout = channel.declare_exchange(names.dead_exchange, "fanout", durable=settings.durable)
    dead = await _declare(fanout, "queue_prefix")
    await _declare(declare_queue(channel, names.tasks, settings), "queue_prefix")
    await declare_retry(channel, names.tasks, settings)
    queue = await _declare(declare_queue(channel, names.dead, settings), "queue_prefix")
    await _declare(queue.bind(dead, names.dead), "queue_prefix")


def retry_of(queue: str) -> str:
    """The queue in which what failed in this one waits for its next attempt."""
    return f"{queue}.retry"


async def declare_retry(channel: AbstractChannel, queue: str, settings: RabbitmqSettings) -> None:
    """Create that queue; its messages go back when they expire. Raises as `declare_all`."""
    back = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": queue}
    if settings.durable:
        # Only with both of these a quorum queue keeps a message until its target has it.
        back |= {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    await _declare(declare_queue(channel, retry_of(queue), settings, back), "queue_prefix")


async def declare_queue(
    channel: AbstractChannel,
    name: str,
    settings: RabbitmqSettings,
    arguments: dict[str, Any] | None = None,
) -> AbstractQueue:
    kind = (
        {"x-queue-type": "quorum", "x-delivery-limit": DELIVERIES_MAX} if settings.durable else {}
    )
    return await channel.declare_queue(
        name, durable=settings.durable, arguments={**kind, **(arguments or {})}
    )


async def _declare(declaring: Any, name_key: str, type_key: str = "") -> Any:
    """Declare; `name_key` has the name, and `type_key` the type of an exchange, where one does.

    Raises InvalidArgument that names the key which the server refuses.
    """
    try:
        async with asyncio.timeout(OPERATION_S):
            return await declaring
    except ValueError as error:  # as in "Max length exceeded for exchange"
        raise InvalidArgument(f"queue.rabbitmq.{name_key}", str(error)) from error
    except ChannelAccessRefused as error:
        # Either a reserved name, or one that the user of the URL has no permissions on.
        key = name_key if "reserved" in str(error) else "url"
        raise InvalidArgument(f"queue.rabbitmq.{key}", str(error)) from error
    except exceptions.ChannelPreconditionFailed as error:
        # As in "inequivalent arg 'type' for exchange 'slatemq'".
        text = str(error)
        if "inequivalent" not in text:  # as in "queue limit in vhost '/' (10) is reached"
            raise InvalidArgument("queue.rabbitmq.url", text) from error
        key = name_key
        if "'durable'" in text or "'x-queue-type'" in text:
            key = "durable"
        elif "'type'" in text:
            key = type_key or name_key
        problem = f"the server has it with other properties: {text}"
        raise InvalidArgument(f"queue.rabbitmq.{key}", problem) from error


WAIT_S: Final = 1.0
"""How long to wait for a message before the connection is looked at again."""


class Deliveries:
    """The messages of a queue, in order, at most the channel's prefetch at a time."""

    def __init__(self, channel: AbstractChannel, connected: asyncio.Event) -> None:
        """`connected` is set while the channel's connection is up."""
        self.channel = channel
        self._connected = connected
        self._arrived: asyncio.Queue[AbstractIncomingMessage] = asyncio.Queue()
        self._lost = asyncio.Event()
        channel.close_callbacks.add(self._on_close)

    async def start(self, queue: AbstractQueue) -> str:
        """Consume a queue; returns the tag of the consumer."""
        underlay = await self.channel.get_underlay_channel()
        # When the queue is deleted, the channel stays open, and no message comes any more.
        underlay.on_consumer_cancel_callbacks.add(self._on_close)
        tag: str = await queue.consume(self._arrive)
        return tag

    async def next(self) -> AbstractIncomingMessage | None:
        """The next message, or None when none comes within a second: ask again.

        Raises ChannelClosed when what was delivered is lost.
        """
        if self.is_lost:
            raise exceptions.ChannelClosed("the channel was lost")
        if not self._arrived.empty():
            return self._arrived.get_nowait()
        getting = asyncio.ensure_future(self._arrived.get())
        losing = asyncio.ensure_future(self._lost.wait())
        try:
            await asyncio.wait(
                [getting, losing], timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            losing.cancel()
            if not getting.done():
                getting.cancel()
        if getting.done() and not getting.cancelled():
            return getting.result()
        if self.is_lost:
            raise exceptions.ChannelClosed("the channel was lost")
        return None

    @property
    def arrived_count(self) -> int:
        """Messages that have arrived and that `next` has not returned."""
        return self._arrived.qsize()

    @property
    def is_lost(self) -> bool:
        """Whether what was delivered is no longer this consumer's."""
        is_up = self._connected.is_set() and not self.channel.is_closed
        return self._lost.is_set() or not is_up

    async def _arrive(self, message: AbstractIncomingMessage) -> None:
        self._arrived.put_nowait(message)

    def _on_close(self, *_: Any) -> None:
        self._lost.set()
