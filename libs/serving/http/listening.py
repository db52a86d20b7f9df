"""Connections by TLS, bounded from their first byte on.

asyncio's own server says of a connection once its handshake is done: those that never end it would
take up files without a bound.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from slatemq._cancelling import end_all

log = logging.getLogger(__name__)

HANDSHAKE_S: Final = 10.0
"""How long a handshake may take."""

BACKLOG: Final = 128
"""Connections that wait to be accepted."""

ACCEPT_AGAIN_S: Final = 1.0
"""After a failure, such as a process without files: so long no connection is accepted."""


def listen_on(host: str, port: int) -> socket.socket:
    """Listen on an address; one of IPv6 may have brackets. Raises OSError."""
    bare = host.strip("[]")
    if ":" not in bare:
        return socket.create_server((bare, port), backlog=BACKLOG)
    return socket.create_server(
        (bare, port),
        family=socket.AF_INET6,
        backlog=BACKLOG,
        dualstack_ipv6=socket.has_dualstack_ipv6(),
    )


class TlsListener:
    """Accepts connections, and gives each a protocol once its handshake is done."""

    def __init__(
        self,
        context: ssl.SSLContext,
        protocol: Callable[[], asyncio.Protocol],
        handshakes_max: int,
    ) -> None:
        """One handshake more than `handshakes_max` ends the oldest."""
        self._context = context
        self._protocol = protocol
        self._handshakes_max = handshakes_max
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._socket: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError."""
        listening = listen_on(host, port)
        self.accept(listening)
        number: int = listening.getsockname()[1]
        return number

    def accept(self, listening: socket.socket) -> None:
        self._socket = listening
        self._socket.setblocking(False)
        self._accepting = asyncio.create_task(self._accept(self._socket))

    async def stop(self) -> None:
        """Stop listening; connections whose handshake is done stay."""
        if self._accepting is None or self._socket is None:
            return
        await end_all([self._accepting, *self._handshakes])
        self._socket.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError as error:
                log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._handshakes) >= self._handshakes_max:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            self._open(connection)

    def _open(self, connection: socket.socket) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            self._handshakes.pop(task, None)
            if task.cancelled():
                connection.close()

        task = asyncio.create_task(self._shake_hands(connection))
        self._handshakes[task] = None
        task.add_done_callback(ended)

    async def _shake_hands(self, connection: socket.socket) -> None:
        with suppress(OSError):  # of TLS, too
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context,
                ssl_handshake_timeout=HANDSHAKE_S,
            )
