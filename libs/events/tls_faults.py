"""Whether it is TLS that keeps a server from answering: asked when a connection has failed.

A server that speaks TLS where the client does not, or the other way round, closes the connection or
says nothing, as one that is down does. A probe distinguishes them. It sends no login, and what it
finds becomes words alone: no connection is made otherwise because of it.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Final, NamedTuple

PROBE_S: Final = 2.0
"""How long each step of a probe may take."""

_TLS_ALERT: Final = b"\x15"
"""What a record of TLS begins with that refuses something (RFC 8446, 5.1)."""

_DATES: Final = frozenset({9, 10})
"""OpenSSL's numbers of a certificate that is not valid yet, or no more: X509_V_ERR_… ."""


class TlsFault(NamedTuple):
    """Something that stays wrong until a setting, or the server, is changed.

    Attributes:
        description: What is wrong.
        is_own: Whether it is the client's certificate that the server refuses.
    """

    description: str
    is_own: bool = False


async def find_tls_fault(
    host: str, port: int, context: ssl.SSLContext | None, hello: bytes
) -> TlsFault | None:
    """What is wrong with TLS between this client and a server; None: nothing, it may be down.

    A certificate that is out of date counts as nothing: the server's operator renews it.

    Args:
        host: Of the server.
        port: Of the server.
        context: What the client connects with; None: it connects without TLS.
        hello: Bytes that the server answers where it speaks no TLS.
    """
    # In a thread, since asyncio drops the alert that refuses a client's certificate.
    return await asyncio.to_thread(_probe, host, port, context, hello)


def _probe(host: str, port: int, context: ssl.SSLContext | None, hello: bytes) -> TlsFault | None:
    address = (host, port)
    if context is None:
        is_tls = _speaks_tls(address)
        return TlsFault(f"{host}:{port} speaks TLS, and this connects without") if is_tls else None
    try:
        with (
            socket.create_connection(address, PROBE_S) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            # In TLS 1.3 a certificate is refused behind the handshake; what is sent before might
            # reset the connection, and the alert would be lost.
            connection.recv(1)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _DATES:
            return None
        return TlsFault(f"the certificate of {host}:{port} is refused: {error.verify_message}")
    except ssl.SSLError as error:
        if _is_alert(error) and "INTERNAL" not in error.reason:
            return TlsFault(f"{host}:{port} refuses this client's TLS: {error.reason}", is_own=True)
    except OSError:
        pass
    if _answers(address, hello):
        return TlsFault(f"{host}:{port} speaks no TLS, and this connects with it")
    return None


def _speaks_tls(address: tuple[str, int]) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # Nothing is sent but the handshake.
    try:
        with socket.create_connection(address, PROBE_S) as plain, context.wrap_socket(plain):
            return True
    except ssl.SSLError as error:
        return _is_alert(error)  # It refuses this handshake, in TLS.
    except OSError:
        return False


def _answers(address: tuple[str, int], hello: bytes) -> bool:
    """Whether a server answers without TLS."""
    try:
        with socket.create_connection(address, PROBE_S) as connection:
            connection.sendall(hello)
            return connection.recv(1) not in (b"", _TLS_ALERT)
    except OSError:
        return False


def _is_alert(error: ssl.SSLError) -> bool:
    return "ALERT" in (error.reason or "")
