"""Whether a server speaks TLS: asked when a connection has failed, to say why.

gRPC reports no more than a closed socket where one side speaks TLS and the other does not. A probe
sends nothing but what opens any connection, no token and no call, and what it finds becomes words
alone: no connection is ever made without TLS because of it.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final

from slatemq.errors import InvalidArgument

TLS_MISMATCH: Final = "TLS_MISMATCH"
"""The reason of an error about a client and a server of which only one speaks TLS."""

PROBE_S: Final = 1.0

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client opens HTTP/2 (RFC 9113, 3.4): the preface, and a SETTINGS frame without settings."""

_FRAME_HEAD_BYTES: Final = 9
_SETTINGS: Final = 4


async def tls_mismatch(address: str, *, is_tls: bool) -> InvalidArgument | None:
    """The error for a client with TLS, or without, that a server of the other kind answers."""
    if is_tls and await _speaks_plain(address):
        return InvalidArgument(
            "endpoint",
            f"{address} speaks no TLS, and this client connects with it: start the service with "
            "--tls-cert, --tls-key and --tls-ca, or leave out ca, cert and tls of the credentials "
            "(--ca, --cert, --tls, their variables and the profile)",
            reason=TLS_MISMATCH,
        )
    if not is_tls and await _speaks_tls(address):
        return InvalidArgument(
            "endpoint",
            f"{address} speaks TLS, and this client connects without: name the authority of its "
            "certificate (--ca FILE, SLATEMQ_CA, or Credentials(ca=...))",
            reason=TLS_MISMATCH,
        )
    return None


async def _speaks_tls(address: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # Nothing is sent to it but the handshake.
    context.set_alpn_protocols(["h2"])
    try:
        writer = (await _open(address, context))[1]
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # It refuses this handshake, in TLS.
    except (OSError, TimeoutError, ValueError):
        return False
    await _close(writer)
    return True


async def _speaks_plain(address: str) -> bool:
    try:
        reader, writer = await _open(address, None)
    except (OSError, TimeoutError, ValueError):
        return False
    try:
        writer.write(_PREFACE)
        async with asyncio.timeout(PROBE_S):
            head = await reader.readexactly(_FRAME_HEAD_BYTES)
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
    finally:
        await _close(writer)
    return head[3] == _SETTINGS and not any(head[5:])


async def _open(
    address: str, context: ssl.SSLContext | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PROBE_S):
        return await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    with suppress(OSError):
        await writer.wait_closed()
