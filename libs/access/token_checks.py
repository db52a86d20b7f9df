"""Checks of static tokens: few at once, and few of one ID after wrong secrets.

A check takes some 50 ms of a processor, and a caller that knows the ID of a token, which is no
secret, can ask for many with secrets that are wrong::

    token ──► is the right secret of its ID known? ── yes ──► compared, in microseconds
                 │ no
                 ▼
              checks of its ID without a right one ── few ──► checked at once
                 │ many
                 ▼
              a line, with one place for each address ──► one is checked in a second

So wrong secrets take no time once the right one has come, which then never waits; and before that,
its holder waits a second for each other address that asks at the same time.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from ipaddress import IPv6Address, IPv6Network
from typing import Final
from urllib.parse import unquote

from libs.access.principals import Principal
from libs.access.reloading import ReloadedFile
from libs.access.token_file import TokenEntry, TokenFile
from slatemq.errors import ResourceExhausted

CHECKS_MAX: Final = 2
"""Tokens that are checked at once; each takes 16 MiB and a processor."""

_THREADS: Final = ThreadPoolExecutor(CHECKS_MAX, thread_name_prefix="access-tokens")

WAITING_MAX: Final = 64
"""Calls that wait for such a check. Good tokens wait once; a flood of forged ones waits here."""

PROMPT_MAX: Final = 5
"""Checks of one ID that found no right secret, before the others have to stand in line."""

PACE_S: Final = 1.0
"""From one check to the next in the line of an ID."""

LINE_MAX: Final = 64
"""Addresses in the line of an ID, and so the longest wait in it, in seconds."""


class _Secret:
    """What is known of the secret of one entry.

    Attributes:
        entry: As it is in the file.
        right: The keyed hash of the token that it is of; empty: that has not come yet.
        checks_count: Checks that have begun without finding it; also those whose call ended.
        turn: Held while one token is checked: the next may learn from it.
    """

    def __init__(self, entry: TokenEntry) -> None:
        self.entry = entry
        self.right = b""
        self.checks_count = 0
        self.turn = asyncio.Lock()
        self._line: set[str] = set()
        self._next_s = 0.0

    @property
    def is_paced(self) -> bool:
        return self.checks_count >= PROMPT_MAX

    def is_of(self, entry: TokenEntry) -> bool:
        """Whether an entry, perhaps of a newer file, has the same secret."""
        mine = self.entry
        return (mine.salt, mine.digest, mine.parameters) == (
            entry.salt,
            entry.digest,
            entry.parameters,
        )

    @contextmanager
    def place(self, address: str) -> Iterator[None]:
        """Stand in line, or raise ResourceExhausted."""
        if address in self._line or len(self._line) >= LINE_MAX:
            raise paced()
        self._line.add(address)
        try:
            yield
        finally:
            self._line.discard(address)

    async def pause(self) -> None:
        """Wait until the next one may be checked."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._next_s - loop.time())
        self._next_s = loop.time() + PACE_S


class TokenChecks:
    def __init__(self, tokens: ReloadedFile[TokenFile]) -> None:
        self._tokens = tokens
        self._key = secrets.token_bytes(32)
        self._secrets: dict[str, _Secret] = {}
        self._at_once = asyncio.Semaphore(CHECKS_MAX)
        self._paced_at_once = asyncio.Semaphore(1)
        self._waiting_count = 0

    def forget(self) -> None:
        """Forget the secrets of entries that are no longer in the file."""
        listed = self._tokens.value
        self._secrets = {one: kept for one, kept in self._secrets.items() if listed.get(one)}

    async def principal_of(
        self, static_id: str, token: str, peer: Callable[[], str]
    ) -> Principal | None:
        """The principal that a token with this ID proves; None: it is wrong.

        Raises ResourceExhausted where too many wait to be checked. `peer` returns where the call
        comes from, and is not called later on.
        """
        secret = self._secret(static_id)
        if secret is None:
            return None
        if secret.right:
            return self._compared(secret, token)
        if secret.is_paced:
            with secret.place(address_of(peer())):
                async with secret.turn:
                    await secret.pause()
                    async with self._paced_at_once:
                        return await self._checked(static_id, token, is_in_line=True)
        with self._room():
            async with secret.turn:
                return await self._checked(static_id, token, is_in_line=False)

    async def _checked(self, static_id: str, token: str, *, is_in_line: bool) -> Principal | None:
        async with self._at_once:
            # Only now: while this call waited the token may have been removed, or found right.
            secret = self._secret(static_id)
            if secret is None:
                return None
            if secret.right:
                return self._compared(secret, token)
            if secret.is_paced and not is_in_line:
                raise paced()
            entry = secret.entry
            secret.checks_count += 1  # Now: a check whose call is cancelled goes on in its thread.
            loop = asyncio.get_running_loop()
            if not await loop.run_in_executor(_THREADS, entry.matches, token):
                return None
            secret.right = self._hash(token)
            return entry.principal

    def _secret(self, static_id: str) -> _Secret | None:
        entry = self._tokens.value.get(static_id)
        if entry is None:
            return None
        secret = self._secrets.get(static_id)
        if secret is None or not secret.is_of(entry):
            secret = self._secrets[static_id] = _Secret(entry)
        secret.entry = entry
        return secret

    def _compared(self, secret: _Secret, token: str) -> Principal | None:
        is_right = hmac.compare_digest(secret.right, self._hash(token))
        return secret.entry.principal if is_right else None

    @contextmanager
    def _room(self) -> Iterator[None]:
        if self._waiting_count >= WAITING_MAX:
            raise too_many_checks()
        self._waiting_count += 1
        try:
            yield
        finally:
            self._waiting_count -= 1

    def _hash(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(), key=self._key, digest_size=32).digest()


def too_many_checks() -> ResourceExhausted:
    """The error of a token that is not checked now, since as many others wait for it as may."""
    return ResourceExhausted(
        "too many tokens wait to be checked", reason="TOKEN_CHECKS", retry_after_ms=1000
    )


def paced() -> ResourceExhausted:
    """The error of a token that is not checked now, since others of its ID were wrong."""
    return ResourceExhausted(
        "wrong secrets were given for the ID of this token: others of the ID are checked one in a "
        "second",
        reason="TOKEN_CHECKS",
        retry_after_ms=int(1000 * PACE_S),
    )


def address_of(peer: str) -> str:
    """The address in what gRPC says of a connection; of IPv6, the network that a host has."""
    host = unquote(peer.rpartition(":")[0]).removeprefix("ipv6:").strip("[]").partition("%")[0]
    try:
        address = IPv6Address(host)
    except ValueError:
        return host
    return str(address.ipv4_mapped or IPv6Network((address, 64), strict=False))
