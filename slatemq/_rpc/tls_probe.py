"""Whether a server speaks TLS, and with whom: asked when a connection has failed, to say why.

gRPC reports no more than a closed socket where one side speaks TLS and the other does not, or where
the server requires a certificate of its clients. A probe sends nothing but what opens any
connection, no token and no call, and what it finds becomes words alone: no connection is ever made
without TLS because of it.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import Final

from slatemq.errors import InvalidArgument, SlateMQError, Unavailable

TLS_MISMATCH: Final = "TLS_MISMATCH"
"""The reason of an error about a client and a server of which only one speaks TLS."""

PROBE_S: Final = 1.0

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""How a client opens HTTP/2 (RFC 9113, 3.4): the preface, and a SETTINGS frame without settings."""

_FRAME_HEAD_BYTES: Final = 9
_SETTINGS: Final = 4


async def tls_mismatch(address: str, *, is_tls: bool, has_certificate: bool) -> SlateMQError | None:
    """The error for a client with TLS, or without, that a server of the other kind answers.

    Unavailable for a client without a certificate, where the server may require one.
    """
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
    if is_tls and not has_certificate and await _closes_at_once(address):
        return Unavailable(
            "it closes connections of TLS: it is stopping, or it requires a certificate of its "
            "clients, and this client has none (--cert FILE and --key FILE, SLATEMQ_CERT and "
            "SLATEMQ_KEY, or Credentials(cert=..., key=...))"
        )
    return None


async def _speaks_tls(address: str) -> bool:
    try:
        writer = (await _open(address, _trusting_all()))[1]
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # It refuses this handshake, in TLS.
    except (OSError, TimeoutError, ValueError):
        return False
    await _close(writer)
    return True


async def _closes_at_once(address: str) -> bool:
    """Whether a server ends the connection of a client without a certificate.

    A server that takes it begins with its SETTINGS, or waits. gRPC's that require one close it
    without an alert, as servers do that stop, and balancers that have none.
    """
    try:
        reader, writer = await _open(address, _trusting_all())
    except (OSError, TimeoutError, ValueError):
        return False
    try:
        async with asyncio.timeout(PROBE_S):
            return not await reader.read(1)
    except ssl.SSLError as error:
        return "CERTIFICATE_REQUIRED" in (error.reason or "")
    except (OSError, TimeoutError):
        return False
    finally:
        await _close(writer)


def _trusting_all() -> ssl.SSLContext:
    """For connections on which nothing is sent but the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    return context


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
