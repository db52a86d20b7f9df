"""A client of the instance for each token: its calls have the rights of that person, and no others.

The console's own certificate goes along with tokens, for instances whose handshake asks for one. It
gives no right: who calls is decided by the token, and without a token none is shown.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
"""Persons at once. Of those who have left, the one whose last request is oldest makes room; where
none has, one more is refused."""

LOGINS_MAX: Final = 4
"""Logins that are checked at once: a check opens connections."""

LOGINS_WAITING_MAX: Final = 16
LOGIN_WAIT_S: Final = 5.0
"""How many logins wait for a check, and how long each: wrong ones must not close the console."""

CALL_S: Final = 5.0
"""How long a page waits for services that are down."""


class OpenInstance(Exception):
    """The console can be reached by others, and the instance lets everyone do everything."""


@dataclass
class _Kept:
    client: Client
    users_count: int = 0
    is_protected: bool = False


class Clients:
    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._clients: OrderedDict[str, _Kept] = OrderedDict()
        self._closing: set[asyncio.Task[None]] = set()
        self._logins = asyncio.Semaphore(LOGINS_MAX)
        self._logins_waiting_count = 0

    @contextmanager
    def kept(self, token: str) -> Iterator[None]:
        """Keep the client with this token, empty: one that proves nothing, while it is used.

        Raises ResourceExhausted where all that may be are in use.
        """
        kept = self._clients.get(token)
        if kept is None:
            self._make_room()
            kept = self._clients[token] = _Kept(self._made(token))
        self._clients.move_to_end(token)
        kept.users_count += 1
        try:
            yield
        finally:
            kept.users_count -= 1

    async def of(self, token: str) -> Client:
        """The client with this token, which is kept.

        Raises:
            OpenInstance: Anyone on the network would be the operator.
            SlateMQError: That could not be found out.
        """
        kept = self._clients[token]
        if self._config.needs_login and not kept.is_protected:
            await _require_policy(kept.client)
            kept.is_protected = True
        return kept.client

    def _make_room(self) -> None:
        if len(self._clients) < CLIENTS_MAX:
            return
        unused = next((token for token, one in self._clients.items() if not one.users_count), None)
        if unused is None:
            raise ResourceExhausted(
                f"{CLIENTS_MAX} people use this console, and no more can: retry in a minute",
                reason="TOO_MANY_CLIENTS",
            )
        self._close(self._clients.pop(unused).client)

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
        for kept in self._clients.values():
            self._close(kept.client)
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


async def answered(asking: Awaitable[T]) -> tuple[T | None, SlateMQError | None]:
    """The answer, or the error that came in its place: of a part without which a page is useful."""
    try:
        return await asking, None
    except SlateMQError as error:
        return None, error


async def _require_policy(client: Client) -> None:
    try:
        await client.check_access("anonymous", "operate")
    except (PermissionDenied, Unauthenticated):
        return  # Something refuses, so there is a policy.
    except FailedPrecondition as error:
        if error.reason == "NO_POLICY":
            raise OpenInstance from error
        raise
