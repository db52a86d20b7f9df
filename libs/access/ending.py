"""Requests by HTTP that can be ended from outside.

A timeout of a socket is one of each read: a server that sends a byte now and then is read for days.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import urllib.request
from contextlib import suppress
from functools import partial
from typing import Any


class Connections:
    """The connections of requests that one thread makes, and another one ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opened: list[socket.socket] = []
        self._is_ended = False

    def handlers(self, context: ssl.SSLContext) -> tuple[urllib.request.BaseHandler, ...]:
        """What an opener of urllib takes, to make these connections."""
        return _HttpHandler(self), _HttpsHandler(self, context)

    def add(self, opened: socket.socket) -> None:
        with self._lock:
            self._opened.append(opened)
            if self._is_ended:
                _shut(opened)

    def end(self) -> None:
        """Let nothing more come: what is being read breaks off."""
        with self._lock:
            self._is_ended = True
            for opened in self._opened:
                _shut(opened)
            self._opened.clear()


class _Connection(http.client.HTTPConnection):
    def __init__(self, *args: Any, connections: Connections, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._connections = connections

    def connect(self) -> None:
        super().connect()
        self._connections.add(self.sock)


class _TlsConnection(_Connection, http.client.HTTPSConnection):
    """By TLS."""


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, connections: Connections) -> None:
        super().__init__()
        self._connections = connections

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Connection, connections=self._connections), req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, connections: Connections, context: ssl.SSLContext) -> None:
        super().__init__(context=context)
        self._tls = context
        self._connections = connections

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        connection = partial(_TlsConnection, connections=self._connections)
        return self.do_open(connection, req, context=self._tls)


def _shut(opened: socket.socket) -> None:
    # Not the method of an SSLSocket, which takes from the thread that reads what it reads with.
    with suppress(OSError):  # It is closed already.
        socket.socket.shutdown(opened, socket.SHUT_RDWR)
