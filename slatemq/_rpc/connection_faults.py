"""Connections that fail, in plain words: gRPC's own are kept for the debug log.

gRPC says for example `failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:4567:
Failed to connect to remote host: Connection refused`.
"""

from __future__ import annotations

import logging
import re
from typing import Final, NamedTuple
from urllib.parse import unquote

log = logging.getLogger(__name__)

HUNG_UP: Final = "it closed the connection"
"""Why a connection failed whose other side ended it."""

UNTRUSTED: Final = "its certificate is not trusted"
OTHER_NAMES: Final = "its certificate has other names"

_NEVER_SENT: Final = re.compile(
    "failed to connect to all addresses|DNS resolution failed|errors resolving"
)
"""How gRPC begins the details of a call that had no connection to go out on."""

_ADDRESS: Final = re.compile(r"\bipv[46]:(?P<address>\S+:\d+): |resolving (?P<name>\S+:\d+):")

_NO_PING_ANSWER: Final = re.compile("ping timeout|keepalive watchdog", re.IGNORECASE)

_WHY: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), why)
    for pattern, why in (
        ("connection refused", "connection refused: no process listens there"),
        ("DNS resolution failed|errors resolving", "its host name cannot be resolved"),
        ("CERTIFICATE_VERIFY_FAILED", UNTRUSTED),
        ("Hostname Verification Check failed", OTHER_NAMES),
        ("TLS handshake failed|SSL handshake failed|TSI_", "the TLS handshake failed"),
        ("unreachable|no route to host", "there is no route to it"),
        ("timed out|timeout", "it did not answer in time"),
        ("socket closed|connection reset|broken pipe|handshake read failed", HUNG_UP),
    )
)
"""Why no connection came about. Of several signs the first counts."""

_BROKEN: Final = re.compile(
    "socket closed|connection reset|broken pipe|stream removed|GOAWAY|RST_STREAM"
    "|cancelling all calls|connection closed|transport closed|endpoint closing|EOF",
    re.IGNORECASE,
)
"""What gRPC says of a connection that ended under a call."""


class ConnectionFault(NamedTuple):
    """Why a call failed for its connection.

    Attributes:
        why: In words that follow a colon.
        address: Where gRPC tried to connect, as far as it says so.
        is_unsent: Whether no byte of the call was sent, so that it cannot have taken effect.
        is_silent: Whether the server answered no ping.
    """

    why: str
    address: str = ""
    is_unsent: bool = False
    is_silent: bool = False

    def message(self, process: str = "") -> str:
        """The fault of a call to a process, such as `broker 0 at 127.0.0.1:4567`."""
        name = process or (self.address and f"the process at {self.address}")
        if self.is_unsent:
            return f"{name or 'the server'} cannot be reached: {self.why}"
        if self.is_silent:
            return f"{name or 'the server'} answers no ping"
        return f"the connection to {name or 'the server'} broke"


def connection_fault(details: str) -> ConnectionFault | None:
    """The fault that gRPC's details of a failed call describe; None where they are about another.

    Only for a call that no server has answered.
    """
    found = _fault(details)
    if found is not None:
        log.debug("a call failed for its connection: %s", details)
    return found


def _fault(details: str) -> ConnectionFault | None:
    if _NEVER_SENT.match(details):
        at = _ADDRESS.search(details)
        address = unquote(at["address"] or at["name"]) if at is not None else ""
        whys = (why for sign, why in _WHY if sign.search(details))
        why = next(whys, "no connection came about")
        return ConnectionFault(why, address, is_unsent=True)
    if _NO_PING_ANSWER.search(details):
        return ConnectionFault("it answers no ping", is_silent=True)
    if _BROKEN.search(details):
        return ConnectionFault(HUNG_UP)
    return None
