"""From the metadata of a call to its principal.

A call proves who makes it by a bearer token in `authorization`, or, without one, by the client
certificate of its connection. A token that is refused is refused, whatever the certificate says.

Checking a static token takes some 50 ms the first time, a JSON Web Token some 0.2 ms. So what a
good token proved is kept, under a keyed hash of the token (so that no token can be read from
memory), until it expires or the files change. Of refused tokens nothing is kept: they could fill
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

from libs.access.jwt_tokens import JwtTokens
from libs.access.principals import Principal
from libs.access.reloading import ReloadedFile, Taken
from libs.access.token_checks import TokenChecks
from libs.access.token_file import TokenFile, token_id
from slatemq.credentials import TOKEN_LENGTH_MAX
from slatemq.errors import Unauthenticated

T = TypeVar("T")

PROVEN_MAX: Final = 10_000

PROVEN_S: Final = 600.0
"""The longest time to keep a proof: the key of a JSON Web Token may be withdrawn meanwhile."""


class Proof(NamedTuple, Generic[T]):
    """What was made of a principal that was proven, and until when that counts.

    Attributes:
        made: What was made of the principal.
        until_s: In seconds since the Unix epoch.
    """

    made: T
    until_s: float


class Authenticator(Generic[T]):
    """Finds out who makes calls, and keeps what is made of each principal beside its proof.

    Attributes:
        files_version: Raised when the files have changed: proofs of before count no more.
    """

    def __init__(
        self,
        tokens: ReloadedFile[TokenFile] | None,
        issuers: ReloadedFile[JwtTokens] | None,
        make: Callable[[Principal], T],
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        """Accept the tokens of these files; None accepts none of that kind."""
        self._tokens = tokens
        self._checks = None if tokens is None else TokenChecks(tokens)
        self._issuers = issuers
        self._make = make
        self._clock_s = clock_s
        self._key = secrets.token_bytes(32)
        self._proven: OrderedDict[bytes, Proof[T]] = OrderedDict()
        self.files_version = 0

    def forget(self) -> None:
        """Check every token again: the files have changed."""
        self.files_version += 1
        self._proven.clear()
        if self._checks is not None:
            self._checks.forget()

    async def watch_files(self, taken: Taken) -> None:
        """Read the files again when they change, for ever; call `taken` after each new version."""

        def changed(file: Path, version: int) -> None:
            self.forget()
            taken(file, version)

        files = [file for file in (self._tokens, self._issuers) if file is not None]
        await asyncio.gather(*(file.watch(changed) for file in files))

    def known(self, authorization: str) -> Proof[T] | None:
        """The proof of a header that was checked before; None: `prove` it."""
        key = self._hash(authorization)
        proof = self._proven.get(key)
        if proof is None:
            return None
        if self._clock_s() >= proof.until_s:
            del self._proven[key]
            return None
        self._proven.move_to_end(key)
        return proof

    async def prove(self, authorization: str, peer: Callable[[], str] = str) -> Proof[T]:
        """The proof that an `authorization` header is.

        `peer` returns where the call comes from; it is called before this waits, or not at all.

        Raises:
            Unauthenticated: The token is not valid (any more), or no token.
            ResourceExhausted: Too many tokens wait to be checked.
            Unavailable: The keys of the token's issuer cannot be read now.
        """
        known = self.known(authorization)
        if known is not None:
            return known
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise _refused("`authorization` must be `Bearer TOKEN`")
        if len(token) > TOKEN_LENGTH_MAX:
            raise _refused(f"the token has more than {TOKEN_LENGTH_MAX} characters")
        files_version = self.files_version
        principal = await self._check(token, peer)
        now_s = self._clock_s()
        if principal.is_expired(now_s):
            raise _refused("the token has expired")
        until_s = min(now_s + PROVEN_S, principal.expires_at_s or math.inf)
        proof = Proof(self._make(principal), until_s)
        if files_version == self.files_version:  # Else what was checked may be old.
            self._proven[self._hash(authorization)] = proof
        while len(self._proven) > PROVEN_MAX:
            self._proven.popitem(last=False)
        return proof

    async def _check(self, token: str, peer: Callable[[], str]) -> Principal:
        static_id = token_id(token)
        if static_id and self._checks is not None:
            principal = await self._checks.principal_of(static_id, token, peer)
            if principal is None:
                raise _refused(
                    "the token is wrong or was removed: ask the operator for a new one, or try "
                    "again in some seconds if it was only just made"
                )
            return principal
        if not static_id and self._issuers is not None:
            return await self._issuers.value.check(token)
        if static_id:
            raise _refused(
                "this service takes no tokens of `slatemq access token`: start it with "
                "--access-tokens, or use a token of one of its issuers"
            )
        raise _refused(
            "the token is not one that `slatemq access token` makes (smq_…), and others are not "
            "accepted: check that it was copied whole"
        )

    def _hash(self, authorization: str) -> bytes:
        return hashlib.blake2b(authorization.encode(), key=self._key, digest_size=32).digest()


def _refused(problem: str) -> Unauthenticated:
    return Unauthenticated(problem, reason="TOKEN_REFUSED")
