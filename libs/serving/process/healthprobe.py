"""`python -m libs.serving.process.healthprobe [OPTION] HOST:PORT`: exit 0 if it serves, else 1.

With `--answers`, exit 0 if it answers calls, serving or not: for standbys, which do not serve.

With `--alive`, exit 0 also if TLS fails with it: for probes that have a process restarted. What
still recovers is to be left alone, and no restart renews a certificate.

A process goes on with the files before where new ones of TLS are bad, or gone. So this does without
those that it cannot use: it shows no certificate, or checks none. Where it has none of its own to
show, a server that needs one counts as one that serves, once it has shown its own.

`http://HOST:PORT` asks a process that has pages in place of gRPC for its `/health`.

For container health checks, which run every few seconds for as long as a container does. So this
imports nothing but sockets (and TLS where SLATEMQ_TLS_CERT names a file), and the images run it
with `python -S -E`: 0.02 s of a processor. With a gRPC library it was 0.13 s, ten times what an
idle broker needs. One call is a few HTTP/2 frames:

    us      preface, SETTINGS, HEADERS (headers as literals), DATA (an empty request)
    server  …, DATA: 5 bytes before the message, HealthCheckResponse (08 01 is SERVING), HEADERS
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable, Mapping

DEADLINE_SECONDS = 2.0

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY = 0, 1, 4, 6, 7
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_STREAM = 1
_EMPTY_MESSAGE = bytes(5)
_STATUS_FIELD = 0x08
_STATUSES = {0: "UNKNOWN", 1: "SERVING", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}
_SERVING = 1
_ANSWERS = (1, 2)


NO_TLS: Mapping[str, str] = {}


def tls_files(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The files of TLS that the environment names, for `probe`; empty without TLS."""
    if not environ.get("SLATEMQ_TLS_CERT"):
        return NO_TLS
    names = {name: environ.get(f"SLATEMQ_TLS_{name.upper()}", "") for name in ("ca", "cert", "key")}
    return names | {"identity": environ.get("SLATEMQ_SERVICE_IDENTITY") or "slatemq-service"}


def probe(
    address: str, tls: Mapping[str, str] = NO_TLS, *, answers: bool = False, alive: bool = False
) -> str:
    """Check the health of a server: empty when it serves, else why it does not.

    `tls` has the files `ca`, `cert` and `key`, and the server's name, `identity`. With `answers`,
    it may also wait or recover; with `alive`, also show a certificate that is not trusted.
    """
    accepted = _ANSWERS if answers or alive else (_SERVING,)

    def ask(connection: socket.socket) -> str:
        status = _ask(connection, address)
        return "" if status in accepted else str(_STATUSES.get(status, status))

    return _asked(address, tls, "h2", ask, alive=alive)


def probe_answers(address: str, tls: Mapping[str, str] = NO_TLS) -> str:
    """Like `probe`, with `answers`."""
    return probe(address, tls, answers=True)


def probe_pages(address: str, tls: Mapping[str, str] = NO_TLS, *, alive: bool = False) -> str:
    """Like `probe`, of a process that answers HTTP: one that serves if it answers."""
    request = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    def ask(connection: socket.socket) -> str:
        connection.sendall(request.encode())
        with connection.makefile("rb") as answer:
            status = answer.readline().decode("latin-1").strip()
        return "" if " 200 " in f"{status} " else status or "no answer"

    return _asked(address, tls, "http/1.1", ask, alive=alive)


def _asked(
    address: str,
    tls: Mapping[str, str],
    protocol: str,
    ask: Callable[[socket.socket], str],
    *,
    alive: bool,
) -> str:
    host, _, port = address.rpartition(":")
    has_pair = True
    try:
        with socket.create_connection((host.strip("[]"), int(port)), DEADLINE_SECONDS) as plain:
            connection = plain
            if tls:
                connection, has_pair = _encrypted(plain, tls, protocol)
            with connection:
                problem = ask(connection)
    except (OSError, ValueError) as error:
        is_unheard = isinstance(error, _UnheardError) and (alive or not has_pair)
        if tls and (is_unheard or (alive and _is_of_tls(error))):
            return ""
        problem = str(error)
    return f"{address}: {problem}" if problem else ""


class _UnheardError(OSError):
    """The server closed the connection before it said anything."""


def _is_of_tls(error: Exception) -> bool:
    import ssl

    return isinstance(error, ssl.SSLError)


def _encrypted(
    plain: socket.socket, tls: Mapping[str, str], protocol: str
) -> tuple[socket.socket, bool]:
    """The connection by TLS, and whether it has a certificate of its own to show."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(tls["ca"])
    except OSError:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    has_pair = True
    try:
        context.load_cert_chain(tls["cert"], tls["key"], "")
    except OSError:
        has_pair = False
    context.set_alpn_protocols([protocol])
    return context.wrap_socket(plain, server_hostname=tls["identity"]), has_pair


def _ask(connection: socket.socket, address: str) -> int:
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/grpc.health.v1.Health/Check",
        ":authority": address,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers.items())
    connection.sendall(
        _PREFACE
        + _frame(_SETTINGS, 0, 0, b"")
        + _frame(_HEADERS, _END_HEADERS, _STREAM, block)
        + _frame(_DATA, _END_STREAM, _STREAM, _EMPTY_MESSAGE)
    )
    with connection.makefile("rb") as answers:
        try:
            is_heard = bool(answers.peek(1))
        except TimeoutError:
            raise
        except OSError:
            is_heard = False
        if not is_heard:
            raise _UnheardError("the server closed the connection")
        while True:
            head = answers.read(9)
            if len(head) < 9:
                raise OSError("the server closed the connection")
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            payload = answers.read(int.from_bytes(head[:3], "big"))
            if kind == _DATA and stream == _STREAM:
                return _status(payload)
            if kind == _HEADERS and stream == _STREAM and flags & _END_STREAM:
                raise OSError("the server refused the call")
            if kind == _GOAWAY:
                raise OSError("the server is going away")
            if kind in (_SETTINGS, _PING) and not flags & _ACK:
                connection.sendall(_frame(kind, _ACK, 0, payload if kind == _PING else b""))


def _status(message: bytes) -> int:
    """The status in a length-prefixed HealthCheckResponse; absent means 0."""
    body = message[len(_EMPTY_MESSAGE) :]
    return body[1] if len(body) == 2 and body[0] == _STATUS_FIELD else 0


def _literal(text: str) -> bytes:
    data = text.encode()
    return bytes([len(data)]) + data


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


if __name__ == "__main__":
    tls, options = tls_files(os.environ), sys.argv[1:-1]
    _, pages, place = sys.argv[-1].rpartition("://")
    alive = "--alive" in options
    if pages:
        sys.exit(probe_pages(place, tls, alive=alive) or 0)
    sys.exit(probe(place, tls, answers="--answers" in options, alive=alive) or 0)
