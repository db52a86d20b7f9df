"""The links of a connection that receive messages."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from proton import Delivery, Link, Message


class ConnectionLost(Exception):
    """The connection, or a link, has ended."""


class Refused(Exception):
    """The server refuses a login or an address."""


class Connected(Protocol):
    """What links need of their connection."""

    def flush(self) -> None:
        """Write what links have to say. Raises ConnectionLost."""

    def forget(self, receiver: Receiver) -> None:
        """Deliver to it no more."""

    async def close_link(self, link: Link) -> None:
        """Close a link with its session; returns once the server has what the link held."""


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

    def accept(self) -> None:
        """Remove it from its queue. Raises ConnectionLost."""
        self._receiver.accept(self._delivery)


class Receiver:
    """A link from an address, in a session of its own: what it holds goes back when that ends."""

    def __init__(self, engine: Connected, link: Link) -> None:
        self.name: str = link.name
        self._engine = engine
        self._link = link
        self._arrived: deque[Received] = deque()
        self._changed = asyncio.Event()
        self._ended: Exception | None = None

    @property
    def is_lost(self) -> bool:
        """Whether what was delivered is no longer this consumer's."""
        return self._ended is not None

    def flow(self, credit: int) -> None:
        """Let `credit` more messages come."""
        self._link.flow(credit)
        self._engine.flush()

    async def drain(self, limit: int) -> list[Received]:
        """What is there now, at most `limit`. Raises ConnectionLost."""
        self._link.drain(limit)
        self._engine.flush()
        while self._link.credit > 0 and self._ended is None:
            self._changed.clear()
            await self._changed.wait()
        self._check()
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

    async def close(self) -> None:
        """Return the messages that it holds to their queue."""
        if self._ended is None:
            self.end(ConnectionLost("it was closed"))
            await self._engine.close_link(self._link)

    def arrive(self, message: Received) -> None:
        self._arrived.append(message)
        self._changed.set()

    def look(self) -> None:
        self._changed.set()

    def end(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._engine.forget(self)
        self._changed.set()

    def _check(self) -> None:
        if self._ended is not None:
            raise ConnectionLost(str(self._ended)) from self._ended
