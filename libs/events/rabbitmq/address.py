"""Where RabbitMQ is, and why a server that is up refuses what a connection begins with."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import Any, Final

import aiormq
from aiormq import exceptions, spec
from yarl import URL

from libs.events import tls_faults
from libs.events.settings import NO_URL
from slatemq.errors import InvalidArgument, Unavailable

ASK_S: Final = 5.0

KEY: Final = "queue.rabbitmq.url"
PORTS: Final = {"amqp": 5672, "amqps": 5671}

_OPTIONS: Final = ("cafile", "capath", "certfile", "keyfile", "no_verify_ssl", "auth", "name")
"""What the query of a URL may have; others have no effect, or are ours to choose."""

NOT_ALLOWED: Final = 530
"""Of a vhost that does not exist, or that the user may not use."""

_HELLO: Final = b"AMQP\x00\x00\x09\x01"


@dataclass(frozen=True, slots=True)
class Address:
    """A URL that was checked.

    Attributes:
        url: As it was given.
        context: What connections speak TLS with; None: without it.
    """

    url: URL
    context: ssl.SSLContext | None

    @classmethod
    def of(cls, text: str) -> Address:
        """The address in a URL. Raises InvalidArgument that names the key."""
        try:
            url = URL(text)
        except ValueError:
            raise InvalidArgument(KEY, NO_URL) from None
        if url.scheme not in PORTS or not url.host:
            raise InvalidArgument(KEY, "must begin with amqp://HOST or amqps://HOST")
        for name in url.query:
            if name not in _OPTIONS:
                raise InvalidArgument(KEY, f"{name} is not an option of the query")
        try:
            return cls(url, _context_of(url) if url.scheme == "amqps" else None)
        except OSError as error:  # ssl.SSLError, too
            raise InvalidArgument(KEY, f"a file of TLS cannot be used: {error}") from error

    async def find_tls_fault(self) -> tls_faults.TlsFault | None:
        """As the function of that name."""
        port = self.url.port or PORTS[self.url.scheme]
        return await tls_faults.find_tls_fault(self.url.host or "", port, self.context, _HELLO)


def _context_of(url: URL) -> ssl.SSLContext:
    query = url.query
    context = ssl.create_default_context(cafile=query.get("cafile"), capath=query.get("capath"))
    if "certfile" in query:
        context.load_cert_chain(query["certfile"], query.get("keyfile"))
    if query.get("no_verify_ssl", "0") != "0":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _AskingConnection(aiormq.Connection):
    """Raises ConnectionClosed with the server's words, which aiormq drops while it connects."""

    @staticmethod
    async def _rpc(
        request: Any, writer: Any, frame_receiver: Any, wait_response: bool = True
    ) -> Any:
        await aiormq.Connection._rpc(request, writer, frame_receiver, wait_response=False)
        if not wait_response:
            return None
        _, _, frame = await frame_receiver.get_frame()
        if isinstance(frame, spec.Connection.Close):
            raise exceptions.ConnectionClosed(frame.reply_code, frame.reply_text)
        return frame


async def check_vhost(address: Address) -> None:
    """Connect to hear why the server refused to open the vhost, if it did.

    Raises InvalidArgument that names the key, and Unavailable where the server has no room now.
    """
    connection = _AskingConnection(address.url, context=address.context)
    try:
        async with asyncio.timeout(ASK_S):
            await connection.connect()
            await connection.close()
    except exceptions.ConnectionClosed as error:
        code, text = error.args
        if code == NOT_ALLOWED and "limit" not in text:  # of connections
            raise InvalidArgument(KEY, text) from error
        raise Unavailable(f"RabbitMQ refuses connections: {text}", reason="BACKEND_DOWN") from error
    except (exceptions.AMQPError, OSError, TimeoutError):
        return  # it is down
