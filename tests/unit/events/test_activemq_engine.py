"""What a server's errors mean for messages under way, by a server of Proton in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from libs.events.settings import ActivemqSettings
from slatemq.errors import Unavailable

pytest.importorskip(
    "proton", reason="requirements/activemq.txt, which takes a C compiler, is not installed"
)

import proton

from libs.events.activemq.connection import Connection, message_of, translated


class Peer(asyncio.Protocol):
    """Accepts links, and ends their session with an error instead of taking a message."""

    def __init__(self, condition: str) -> None:
        self._condition = condition
        self._collector = proton.Collector()
        self._connection = proton.Connection()
        self._connection.collect(self._collector)
        self._proton = proton.Transport(mode=proton.Transport.SERVER)
        sasl = self._proton.sasl()
        sasl.allow_insecure_mechs = True
        sasl.allowed_mechs("ANONYMOUS")
        sasl.done(proton.SASL.OK)
        self._proton.bind(self._connection)
        self._socket: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._proton.push(data)
        while (event := self._collector.peek()) is not None:
            self._handle(event)
            self._collector.pop()
        while (pending := self._proton.pending()) > 0:
            self.socket.write(self._proton.peek(pending))
            self._proton.pop(pending)

    @property
    def socket(self) -> asyncio.Transport:
        assert self._socket is not None
        return self._socket

    def _handle(self, event: Any) -> None:
        if event.type == proton.Event.CONNECTION_REMOTE_OPEN:
            self._connection.open()
        elif event.type == proton.Event.SESSION_REMOTE_OPEN:
            event.session.open()
        elif event.type == proton.Event.LINK_REMOTE_OPEN:
            event.link.source.copy(event.link.remote_source)
            event.link.target.copy(event.link.remote_target)
            event.link.open()
            event.link.flow(10)
        elif event.type == proton.Event.DELIVERY:
            event.link.session.condition = proton.Condition(self._condition, "not this one")
            event.link.session.close()


@asynccontextmanager
async def connected(condition: str) -> AsyncIterator[Connection]:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Peer(condition), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection(ActivemqSettings(url=f"amqp://127.0.0.1:{port}"))
        try:
            yield connection
        finally:
            await connection.close()


@pytest.mark.parametrize("condition", ["amqp:not-implemented", "amqp:internal-error"])
async def test_a_message_whose_session_the_server_ends_is_to_be_sent_again(condition: str) -> None:
    async with connected(condition) as connection:
        with pytest.raises(Unavailable, match="not this one"), translated():
            await connection.send("queue", message_of(b"{}", "id"))
