"""A client of the instance for each token: its calls have the rights of that person, and no others.

The console's own certificate goes along with tokens, for instances whose handshake asks for one. It
gives no right: who calls is decided by the token, and without a token none is shown.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final, TypeVar

from services.console.config import ConsoleConfig
from slatemq.client import Client, connect
from slatemq.credentials import Credentials
from slatemq.errors import (
    FailedPrecondition,
    PermissionDenied,
    ResourceExhausted,
    SlateMQError,
    Unauthenticated,
)

T = TypeVar("T")

CLIENTS_MAX: Final = 64
"""Persons at once; the one whose last request is oldest makes place."""

LOGINS_MAX: Final = 4
"""Logins that are checked at once: a check opens connections."""

LOGINS_WAITING_MAX: Final = 16
LOGIN_WAIT_S: Final = 5.0
"""How many logins wait for a check, and how long each: wrong ones must not close the console."""

CALL_S: Final = 5.0
"""How long a page waits for services that are down."""


class OpenInstance(Exception):
    """The console can be reached by others, and the instance lets everyone do everything."""


class Clients:
    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._clients: OrderedDict[str, Client] = OrderedDict()
        self._protected: set[str] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._logins = asyncio.Semaphore(LOGINS_MAX)
        self._logins_waiting_count = 0

    async def of(self, token: str) -> Client:
        """The client with this token; empty: one that proves nothing.

        Raises:
            OpenInstance: Anyone on the network would be the operator.
            SlateMQError: That could not be found out.
        """
        client = self._clients.get(token)
        if client is None:
            client = self._clients[token] = self._made(token)
            while len(self._clients) > CLIENTS_MAX:
                gone, oldest = self._clients.popitem(last=False)
                self._protected.discard(gone)
                self._close(oldest)
        self._clients.move_to_end(token)
        if self._config.needs_login and token not in self._protected:
            await _require_policy(client)
            self._protected.add(token)
        return client

    async def check(self, token: str) -> None:
        """Raises SlateMQError unless the instance knows who has this token.

        That is ResourceExhausted where too many logins wait, or this one has waited too long.
        """
        await self._take_turn()
        try:
            client = self._made(token)
            try:
                await client.topology()  # One call, which is not repeated.
            finally:
                await client.close()
        finally:
            self._logins.release()

    async def _take_turn(self) -> None:
        if self._logins_waiting_count >= LOGINS_WAITING_MAX:
            raise _too_many_logins()
        self._logins_waiting_count += 1
        try:
            async with asyncio.timeout(LOGIN_WAIT_S):
                await self._logins.acquire()
        except TimeoutError:
            raise _too_many_logins() from None
        finally:
            self._logins_waiting_count -= 1

    async def close(self) -> None:
        for client in self._clients.values():
            self._close(client)
        self._clients.clear()
        await asyncio.gather(*self._closing)

    def _made(self, token: str) -> Client:
        config = self._config
        credentials = Credentials(token=token)
        if config.tls_ca:
            has_proof = bool(token)
            credentials = Credentials(
                ca=Path(config.tls_ca),
                cert=Path(config.tls_cert) if has_proof else None,
                key=Path(config.tls_key) if has_proof else None,
                token=token,
            )
        return connect(config.endpoint, call_timeout=CALL_S, credentials=credentials, tracing=True)

    def _close(self, client: Client) -> None:
        task = asyncio.create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _too_many_logins() -> ResourceExhausted:
    return ResourceExhausted("too many logins are being checked", reason="TOO_MANY_LOGINS")


async def gathered(listing: AsyncIterator[T]) -> tuple[list[T], SlateMQError | None]:
    """What a listing has, and the error that ended it, if one did."""
    found: list[T] = []
    try:
        async for one in listing:
            found.append(one)  # noqa: PERF401 - what came before an error counts
    except SlateMQError as error:
        return found, error
    return found, None


async def _require_policy(client: Client) -> None:
    try:
        await client.check_access("anonymous", "operate")
    except (PermissionDenied, Unauthenticated):
        return  # Something refuses, so there is a policy.
    except FailedPrecondition as error:
        if error.reason == "NO_POLICY":
            raise OpenInstance from error
        raise
