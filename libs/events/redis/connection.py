"""The connection to Redis, and what its errors mean."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from redis import asyncio as aioredis
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from libs.events.cancellations import keeping_cancellations
from libs.events.settings import NO_URL, RedisSettings
from slatemq.errors import FailedPrecondition, InvalidArgument, Unavailable

OPERATION_S = 10.0
"""How long one command may take, connecting included."""

BLOCK_MS = 1_000
"""How long a read waits for the first entry; far below `OPERATION_S`."""

HOLD_MS = 30_000
"""How long after a consumer's last sign of life others take its entries."""

KEEP_S = HOLD_MS / 1000 / 3
"""How often a consumer shows that it is alive, while it has something."""

FORGET_CONSUMER_MS = 3_600_000
"""How long a consumer that has nothing must be silent to be forgotten: longer than any of its
commands takes, which may still bring it something."""

RECLAIM_S = 5.0
"""How often a consumer looks for the entries of dead ones."""

READ_COUNT = 10
"""Entries of one read."""

_DOWN = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterDownError,
    exceptions.OutOfMemoryError,
    exceptions.TryAgainError,
    OSError,
    asyncio.TimeoutError,
)

_PASSING = ("OOM", "MISCONF", "NOREPLICAS", "BUSY", "READONLY")
"""What errors of a server begin with, or have in the error of a script, that will take writes
again."""

_OPTIONS: Final = ("db", "username", "password", "client_name", "protocol")
"""What the query of a URL may have, beside `ssl_…`: others would change what callers rely on."""

HELLO: Final = b"PING\r\n"

_CLOSED = "the handler is closed"
"""Of uvloop's RuntimeError, where a server goes as it is written to; asyncio raises an OSError."""


@contextmanager
def translated() -> Iterator[None]:
    """Raises Unavailable for a server that is down, FailedPrecondition for what it refuses."""
    try:
        with keeping_cancellations():
            yield
    except (exceptions.AuthenticationError, exceptions.NoPermissionError) as error:
        raise FailedPrecondition("LOGIN", f"Redis refuses the login: {error}") from error
    except _DOWN as error:
        raise Unavailable(f"Redis cannot be reached: {error}", reason="BACKEND_DOWN") from error
    except RuntimeError as error:
        if _CLOSED not in str(error):
            raise
        raise Unavailable("Redis closed the connection", reason="BACKEND_DOWN") from error
    except exceptions.ResponseError as error:
        if any(word in str(error) for word in _PASSING):
            raise Unavailable(f"Redis refuses writes: {error}", reason="BACKEND_DOWN") from error
        raise FailedPrecondition("REFUSED", f"Redis refuses a command: {error}") from error


class _Pool(aioredis.ConnectionPool):  # type: ignore[misc]
    """Connections that stay closed once their client is closed.

    redis-py connects again for calls that are under way, and nothing closes that connection.
    """

    _is_closed = False

    async def ensure_connection(self, connection: Any) -> None:
        if not self._is_closed:
            await super().ensure_connection(connection)
        if self._is_closed:
            await connection.disconnect()
            raise exceptions.ConnectionError("the client is closed")

    async def aclose(self) -> None:
        self._is_closed = True
        await super().aclose()


def open_client(settings: RedisSettings) -> aioredis.Redis:
    """A client that connects when it is used. Raises InvalidArgument for an invalid URL."""
    _check_url(settings.url)
    try:
        pool = _Pool.from_url(
            settings.url,
            socket_timeout=OPERATION_S,
            socket_connect_timeout=OPERATION_S,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),  # callers retry, and say so
            decode_responses=False,
        )
        context_of(pool)
    except (ValueError, TypeError, exceptions.RedisError, OSError) as error:
        raise InvalidArgument("queue.redis.url", str(error)) from error
    return aioredis.Redis.from_pool(pool)


def _check_url(text: str) -> None:
    """Refuse what redis-py would pass over, such as a database that is no number."""
    try:
        url = urlsplit(text)
        _ = url.port
        options = parse_qs(url.query, keep_blank_values=True)
    except ValueError:
        raise InvalidArgument("queue.redis.url", NO_URL) from None
    if url.scheme not in ("redis", "rediss"):
        raise InvalidArgument("queue.redis.url", "must begin with redis:// or rediss://")
    databases = [url.path.removeprefix("/"), *options.get("db", [])]
    if not all(one == "" or (one.isascii() and one.isdecimal()) for one in databases):
        raise InvalidArgument("queue.redis.url", "the path, and db, must be a database number")
    for name in options:
        if name not in _OPTIONS and not name.startswith("ssl_"):
            raise InvalidArgument("queue.redis.url", f"{name} is not an option of the query")


def context_of(pool: aioredis.ConnectionPool) -> ssl.SSLContext | None:
    """What connections of a pool speak TLS with; None: without it.

    Raises what redis-py does for options of the URL, and OSError for files that cannot be read.
    """
    connection: Any = pool.make_connection()
    if not isinstance(connection, aioredis.SSLConnection):
        return None
    context: ssl.SSLContext = connection.ssl_context.get()
    return context


def make_consumer_name() -> str:
    """A unique name that says where the consumer runs."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
