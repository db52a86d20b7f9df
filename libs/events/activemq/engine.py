"""AMQP 1.0 on asyncio: Proton's protocol engine, which does no I/O of its own, on a transport.

Everything runs on the event loop, without threads. A connection that was lost stays lost.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from proton import (
    SASL,
    Collector,
    Connection,
    Data,
    DataException,
    Delivery,
    Endpoint,
    Event,
    Link,
    Message,
    Session,
    Terminus,
    Transport,
)

from libs.events.refusals import TooLarge, bytes_max_by

IDLE_S = 20.0
"""Without a frame for so long, either side counts the connection as lost."""

TICK_S = 2.0

CLOSE_S = 5.0
"""How long a server has to answer the end of a session, and to take what a connection ends with."""

HEAD_BYTES_MAX = 4096
"""Of a message, to find its ID in: it is near the beginning."""

_PROPERTIES = 0x73
"""The section of a message that begins with its ID."""

_LOGIN_REFUSED = "amqp:unauthorized-access"

_TOO_LARGE = "amqp:link:message-size-exceeded"

_REFUSALS = frozenset(
    {
        _LOGIN_REFUSED,
        "amqp:not-found",
        "amqp:not-allowed",
        "amqp:invalid-field",
        "amqp:not-implemented",
        "amqp:precondition-failed",
    }
)


class ConnectionLost(Exception):
    """The connection, or a link, has ended."""


class Refused(Exception):
    """The server refuses a login or an address.

    Attributes:
        is_login: Whether it is the user who may not do that.
    """

    def __init__(self, text: str, *, is_login: bool) -> None:
        super().__init__(text)
        self.is_login = is_login


class Received:
    """A message that is this consumer's until it is accepted, or its receiver ends."""

    def __init__(self, message: Message, delivery: Delivery, receiver: Receiver) -> None:
        self._delivery = delivery
        self._receiver = receiver
        self.id = str(message.id)
        properties: Any = message.properties  # None where the message has none
        self.properties: dict[str, Any] = dict(properties or {})
        body: Any = message.body
        # What other programs send may be of any type.
        is_binary = isinstance(body, bytes | bytearray | memoryview)
        self.body = bytes(body) if is_binary else str(body).encode()

    @property
    def is_lost(self) -> bool:
        """Whether it has gone back to its queue."""
        return self._receiver.is_lost

    def accept(self) -> None:
        """Remove it from its queue. Raises ConnectionLost."""
        self._receiver.accept(self._delivery)


class _IncomingLink(ABC):
    """A link from an address, in a session of its own: what it holds goes back when that ends."""

    def __init__(self, engine: Engine, link: Link) -> None:
        self.name: str = link.name
        self._engine = engine
        self._link = link
        self._changed = asyncio.Event()
        self._ended: Exception | None = None

    @property
    def is_lost(self) -> bool:
        """Whether what was delivered is no longer this consumer's."""
        return self._ended is not None

    @abstractmethod
    def read(self, delivery: Delivery) -> None:
        """Read what has come of a message."""

    async def close(self) -> None:
        """Return the messages that it holds to their queue."""
        if self._ended is None:
            self.end(ConnectionLost("it was closed"))
            await self._engine.close_link(self._link)

    def look(self) -> None:
        self._changed.set()

    def end(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._engine.forget(self)
        self._changed.set()

    async def _drained(self, limit: int, is_enough: Callable[[], bool] = lambda: False) -> None:
        """Wait until what is there has come, at most `limit`. Raises ConnectionLost."""
        self._link.drain(limit)
        self._engine.flush()
        while self._link.credit > 0 and self._ended is None and not is_enough():
            self._changed.clear()
            await self._changed.wait()
        self._check()

    def _check(self) -> None:
        if self._ended is not None:
            raise ConnectionLost(str(self._ended)) from self._ended


class Receiver(_IncomingLink):
    """Gets messages; those that are not accepted go back when it ends."""

    def __init__(self, engine: Engine, link: Link) -> None:
        super().__init__(engine, link)
        self._arrived: deque[Received] = deque()

    @property
    def arrived(self) -> Sequence[Received]:
        """What has come and was not taken yet; a server may not show it to others."""
        return () if self.is_lost else tuple(self._arrived)

    def flow(self, credit: int) -> None:
        """Let `credit` more messages come."""
        self._link.flow(credit)
        self._engine.flush()

    async def drain(self, limit: int) -> list[Received]:
        """What is there now, at most `limit`. Raises ConnectionLost."""
        await self._drained(limit)
        found = list(self._arrived)
        self._arrived.clear()
        return found

    async def wait(self) -> None:
        """Wait until there is a message, or the link is lost."""
        while not self._arrived and self._ended is None:
            self._changed.clear()
            await self._changed.wait()

    async def next(self) -> Received:
        """The next message. Raises ConnectionLost."""
        await self.wait()
        self._check()
        return self._arrived.popleft()

    def peek(self) -> Received | None:
        """The next message, if there is one, which stays. Raises ConnectionLost."""
        self._check()
        return self._arrived[0] if self._arrived else None

    def accept(self, delivery: Delivery) -> None:
        """Remove a message from its queue, and let the next one come. Raises ConnectionLost."""
        self._check()
        delivery.update(Delivery.ACCEPTED)
        delivery.settle()
        if not self._link.drain_mode:
            self._link.flow(1)
        self._engine.flush()

    def read(self, delivery: Delivery) -> None:
        if delivery.partial:
            return
        message = Message()
        message.decode(_read_part(self._link, delivery))
        self._arrived.append(Received(message, delivery, self))
        self._changed.set()


class IdBrowser(_IncomingLink):
    """Gets the IDs of messages, which stay where they are, and keeps nothing else of them."""

    def __init__(self, engine: Engine, link: Link) -> None:
        super().__init__(engine, link)
        self._ids: list[str] = []
        self._head = b""
        self._size_bytes = 0

    async def ids(self, limit: int, bytes_max: int) -> list[str]:
        """The IDs of what is there now: at most `limit`, or of `bytes_max` and little more.

        Raises ConnectionLost.
        """
        await self._drained(limit, lambda: self._size_bytes >= bytes_max)
        return self._ids

    def read(self, delivery: Delivery) -> None:
        part = _read_part(self._link, delivery)
        self._size_bytes += len(part)
        self._head += part[: HEAD_BYTES_MAX - len(self._head)]
        if not delivery.partial:
            self._ids.append(_id_in(self._head))
            self._head = b""
        self._changed.set()


def _read_part(link: Link, delivery: Delivery) -> bytes:
    """What has come of a message since the last part of it."""
    part = link.recv(delivery.pending) or b""
    if not delivery.partial:
        link.advance()
    return part


def _id_in(head: bytes) -> str:
    """The ID of a message that begins so, in the form of `Received.id`."""
    while head:
        section = Data()
        try:
            head = head[section.decode(head) :]
        except DataException:  # it is longer than the head
            break
        section.next()
        if section.is_described():
            found = section.get_py_described()
            if found.descriptor == _PROPERTIES and found.value:
                return str(found.value[0])
    return str(None)


L = TypeVar("L", bound=_IncomingLink)


class _Opening(NamedTuple):
    link: Link
    opened: asyncio.Future[None]


class Engine(asyncio.Protocol):
    """One connection."""

    def __init__(self, user: str | None, password: str | None, hostname: str, name: str) -> None:
        self._collector = Collector()
        self._connection = Connection()
        self._connection.collect(self._collector)
        self._connection.container = name  # which no other connection has
        self._connection.hostname = hostname
        self._proton = Transport()
        self._proton.idle_timeout = IDLE_S
        sasl: SASL = self._proton.sasl()
        sasl.allow_insecure_mechs = True
        sasl.allowed_mechs("PLAIN" if user else "ANONYMOUS")
        if user:
            self._connection.user = user
            self._connection.password = password or ""
        self._socket: asyncio.Transport | None = None
        self._lost: Exception | None = None
        self._numbers = itertools.count()
        self._opening: dict[str, _Opening] = {}
        self._sending: dict[str, asyncio.Future[None]] = {}
        self._receivers: dict[str, _IncomingLink] = {}
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._ticking: asyncio.TimerHandle | None = None
        self._sessions = asyncio.Lock()
        self._ending: asyncio.Future[None] | None = None
        self._disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- Life cycle ---------------------------------------------------------

    async def opened(self) -> None:
        """Wait until the server has opened the connection. Raises ConnectionLost, Refused."""
        await self._opened

    @property
    def is_lost(self) -> bool:
        """Whether nothing more comes or goes."""
        return self._lost is not None

    async def close(self) -> None:
        """Close it; what was not accepted goes back to its queues."""
        if self._lost is not None:
            return
        self._connection.close()
        self._pump()
        self._end(ConnectionLost("it was closed"))
        if self._socket is not None:
            self._socket.close()  # which first writes what is left
            try:
                await asyncio.wait([self._disconnected], timeout=CLOSE_S)
            finally:
                self._socket.abort()

    def check(self) -> None:
        """Raise what ended the connection."""
        if self._lost is not None:
            raise ConnectionLost(str(self._lost)) from self._lost

    # --- Links --------------------------------------------------------------

    async def open_session(self) -> Session:
        """A session. Raises ConnectionLost."""
        async with self._sessions:
            self.check()
            session: Session = self._connection.session()
            session.open()
            self.flush()
        return session

    async def open_sender(self, address: str) -> Link:
        """A link to an address, for `transfer`. Raises ConnectionLost, Refused."""
        session = await self.open_session()
        link = session.sender(self._next_name())
        link.target.address = address
        link.target.durability = Terminus.DELIVERIES
        link.source.address = link.name
        link.snd_settle_mode = Link.SND_UNSETTLED
        await self._open(link)
        return link

    async def open_receiver(self, address: str, browse: bool) -> Receiver:
        """A link from an address, without credit: `browse` leaves messages where they are.

        Raises ConnectionLost, Refused.
        """
        link = await self._incoming_link(address, browse)
        return await self._open_incoming(link, Receiver(self, link))

    async def open_id_browser(self, address: str) -> IdBrowser:
        """A link that shows which messages an address has. Raises ConnectionLost, Refused."""
        link = await self._incoming_link(address, browse=True)
        return await self._open_incoming(link, IdBrowser(self, link))

    async def _incoming_link(self, address: str, browse: bool) -> Link:
        session = await self.open_session()
        link = session.receiver(self._next_name())
        link.source.address = address
        link.source.durability = Terminus.DELIVERIES
        if browse:
            link.source.distribution_mode = Terminus.DIST_MODE_COPY
        link.target.address = link.name
        return link

    async def _open_incoming(self, link: Link, incoming: L) -> L:
        self._receivers[link.name] = incoming
        try:
            await self._open(link)
        except BaseException:
            incoming.end(ConnectionLost("it was not opened"))
            raise
        return incoming

    async def _open(self, link: Link) -> None:
        opened = asyncio.get_running_loop().create_future()
        self._opening[link.name] = _Opening(link, opened)
        try:
            link.open()
            self._pump()
            await opened
        except Refused:
            await self.close_link(link)
            raise
        finally:
            del self._opening[link.name]

    async def close_link(self, link: Link) -> None:
        """Close a link with its session; returns once the server has what the link held.

        Until then no session begins: Proton would give it the number of the one that ends.
        """
        async with self._sessions:
            if self._lost is not None:
                return
            session = link.session
            for endpoint in (link, session):
                if self._lost is None:
                    await self._close_endpoint(endpoint)

    async def _close_endpoint(self, endpoint: Link | Session) -> None:
        if endpoint.state & Endpoint.REMOTE_CLOSED:
            endpoint.close()
            self._pump()
            return
        self._ending = asyncio.get_running_loop().create_future()
        endpoint.close()
        self._pump()
        await asyncio.wait([self._ending], timeout=CLOSE_S)
        if not self._ending.done():
            self.abort(ConnectionLost("the server does not end a session"))

    async def transfer(self, link: Link, message: Message) -> None:
        """Send a message; returns once the server has accepted it.

        Raises ConnectionLost, TooLarge.
        """
        self.check()
        bytes_max = link.remote_max_message_size
        if bytes_max and len(message.encode()) > bytes_max:
            raise TooLarge(f"the server takes {bytes_max} bytes at most", bytes_max)
        tag = str(next(self._numbers))
        settled = self._sending[tag] = asyncio.get_running_loop().create_future()
        try:
            link.send(message, tag)
            self._pump()
            await settled
        finally:
            del self._sending[tag]

    def flush(self) -> None:
        """Write what links have to say. Raises ConnectionLost."""
        self._pump()
        self.check()

    def forget(self, receiver: _IncomingLink) -> None:
        self._receivers.pop(receiver.name, None)

    def _next_name(self) -> str:
        return f"{self._connection.container}-{next(self._numbers)}"

    # --- asyncio ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)  # uvloop's is no subclass
        self._proton.bind(self._connection)
        self._connection.open()
        self._tick()

    def data_received(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._lost is None:
            capacity = self._proton.capacity()
            if capacity <= 0:
                break
            self._proton.push(bytes(view[:capacity]))
            view = view[capacity:]
            self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disconnected.set_result(None)
        self.abort(ConnectionLost(str(exc) if exc else "the server ended it"))

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._proton.tick(loop.time())
        self._pump()
        if self._lost is None:
            self._ticking = loop.call_later(TICK_S, self._tick)

    # --- Proton -------------------------------------------------------------

    def _pump(self) -> None:
        """Handle the events of Proton, and write its output."""
        if self._socket is None:
            return
        while (event := self._collector.peek()) is not None:
            handle = _HANDLERS.get(event.type)
            if handle is not None and self._lost is None:
                handle(self, event)
            self._collector.pop()
        while self._lost is None and (pending := self._proton.pending()) > 0:
            data = self._proton.peek(pending)
            if not data:
                break
            self._socket.write(data)
            self._proton.pop(len(data))

    def _on_opened(self, _: Any) -> None:
        if not self._opened.done():
            self._opened.set_result(None)

    def _on_link_opened(self, event: Any) -> None:
        opening = self._opening.get(event.link.name)
        remote = event.link.remote_target if event.link.is_sender else event.link.remote_source
        # An end without an address is a refusal, whose reason follows.
        if opening is not None and not opening.opened.done() and remote.address is not None:
            opening.opened.set_result(None)

    def _on_ended(self, event: Any) -> None:
        """The server ended the connection or a session: everything is opened again."""
        if event.context.state & Endpoint.LOCAL_ACTIVE:
            error = _error_of(event.context)
            for opening in self._opening.values():
                if event.context in (opening.link.session, self._connection):
                    _fail(opening.opened, error)
            self.abort(error)
        elif event.type == Event.SESSION_REMOTE_CLOSE:
            event.session.free()
            self._end_ended()

    def _on_link_ended(self, event: Any) -> None:
        link, error = event.link, _error_of(event.link)
        opening = self._opening.get(link.name)
        receiver = self._receivers.get(link.name)
        if opening is not None and not opening.opened.done():
            opening.opened.set_exception(error)
        elif receiver is not None:
            receiver.end(error)
        elif link.state & Endpoint.LOCAL_ACTIVE:
            self.abort(error)
        else:
            self._end_ended()  # freed with its session: a server may refuse what freeing settles

    def _end_ended(self) -> None:
        if self._ending is not None and not self._ending.done():
            self._ending.set_result(None)

    def _on_flow(self, event: Any) -> None:
        receiver = self._receivers.get(event.link.name)
        if receiver is not None:
            receiver.look()

    def _on_delivery(self, event: Any) -> None:
        delivery: Delivery = event.delivery
        if event.link.is_sender:
            self._on_outcome(delivery)
        elif delivery.readable:
            receiver = self._receivers.get(event.link.name)
            if receiver is not None:
                receiver.read(delivery)
            else:  # it goes back with its session
                _read_part(event.link, delivery)

    def _on_outcome(self, delivery: Delivery) -> None:
        if not delivery.remote_state and not delivery.settled:
            return
        settled = self._sending.get(delivery.tag)
        if settled is not None and not settled.done():
            if delivery.remote_state == Delivery.ACCEPTED:
                settled.set_result(None)
            else:
                why = delivery.remote.condition if delivery.remote_state else None
                settled.set_exception(
                    ConnectionLost(f"the server did not accept a message: {why or 'no reason'}")
                )
        delivery.settle()

    def _on_transport_error(self, event: Any) -> None:
        self.abort(_error_of(event.transport))

    def abort(self, error: Exception) -> None:
        """End it without closing, as the server does not answer.

        All that waits gets the error. Only who opens the connection can be refused by it: what a
        server did with a message that was sent is not known.
        """
        self._end(error)
        if self._socket is not None:
            self._socket.abort()  # closing would wait for the server to take what is written

    def _end(self, error: Exception) -> None:
        if self._lost is not None:
            return
        self._lost = error
        if self._ticking is not None:
            self._ticking.cancel()
        _fail(self._opened, error)
        lost = ConnectionLost(str(error)) if isinstance(error, Refused) else error
        for waiting in (*(one.opened for one in self._opening.values()), *self._sending.values()):
            _fail(waiting, lost)
        if not self._opened.cancelled():
            self._opened.exception()  # retrieved, in case no caller waits for it
        self._end_ended()
        for receiver in list(self._receivers.values()):
            receiver.end(error)


def _fail(waiting: asyncio.Future[None], error: Exception) -> None:
    if not waiting.done():
        waiting.set_exception(error)


def _error_of(ended: Any) -> Exception:
    """Why a server ended something."""
    condition = ended.condition if isinstance(ended, Transport) else ended.remote_condition
    if condition is None:
        return ConnectionLost("the server ended it")
    text = f"{condition.description or condition.name}"
    bytes_max = bytes_max_by(text)
    if condition.name == _TOO_LARGE or bytes_max is not None:
        return TooLarge(text, bytes_max or math.inf)
    if condition.name in _REFUSALS:
        return Refused(text, is_login=condition.name == _LOGIN_REFUSED)
    return ConnectionLost(text)


_HANDLERS: dict[Any, Callable[[Engine, Any], None]] = {
    Event.CONNECTION_REMOTE_OPEN: Engine._on_opened,
    Event.CONNECTION_REMOTE_CLOSE: Engine._on_ended,
    Event.SESSION_REMOTE_CLOSE: Engine._on_ended,
    Event.LINK_REMOTE_OPEN: Engine._on_link_opened,
    Event.LINK_REMOTE_CLOSE: Engine._on_link_ended,
    Event.LINK_REMOTE_DETACH: Engine._on_link_ended,
    Event.LINK_FLOW: Engine._on_flow,
    Event.DELIVERY: Engine._on_delivery,
    Event.TRANSPORT_ERROR: Engine._on_transport_error,
}
