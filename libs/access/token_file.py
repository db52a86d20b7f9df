"""Static tokens: a file of names and hashes.

As in::

    tokens:
      - id: 4k7m2pqa
        principal: shop
        hash: scrypt:16384:8:1:mJ3…:Vn9…
        attributes: {tenant: shop}
        expires: 2027-01-01T00:00:00Z

A token is `smq_<id>_<secret>`; the file has no secrets. Two tokens of one principal are how a token
is replaced: add the new one, give it out, remove the old one.
"""

from __future__ import annotations

import base64
import hmac
import math
import re
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Annotated, Final

import msgspec

from libs.access.principals import ATTRIBUTES_MAX, NAME_LENGTH_MAX, Principal
from libs.documents import Document
from slatemq._tokens import BLOCK, COST, HASH_BYTES, PARALLEL, SALT_BYTES, hash_token

COST_MAX: Final = 1 << 17
"""Of a check, with the usual block size and parallelism: eight times what it is by default."""

_TOKEN = re.compile(r"smq_([a-z0-9]{4,32})_([A-Za-z0-9_-]{20,128})")

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_LENGTH_MAX)]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]{4,32}$")]
    principal: _Name
    hash: str
    attributes: Annotated[
        dict[_Name, str | list[str]], msgspec.Meta(max_length=ATTRIBUTES_MAX)
    ] = {}
    expires: Annotated[datetime, msgspec.Meta(tz=True)] | None = None


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token of the file.

    Attributes:
        id: What the token begins with, after `smq_`; no secret.
        principal: Who it proves its holder to be.
        salt, digest: Of scrypt, with the cost, block size and parallelism of `parameters`.
    """

    id: str
    principal: Principal
    salt: bytes
    digest: bytes
    parameters: tuple[int, int, int]

    def matches(self, token: str) -> bool:
        """Whether this is the token. Takes some 50 ms and 16 MiB: call it in a thread."""
        return hmac.compare_digest(hash_token(token, self.salt, self.parameters), self.digest)


class TokenFile:
    """The tokens of a file, by ID."""

    def __init__(self, document: Document) -> None:
        """Check all of it; raises InvalidArgument that names the key and the line."""
        for key in document.values:
            if key != "tokens":
                raise document.error(str(key), "unknown; a file of tokens has `tokens`")
        self._entries: dict[str, TokenEntry] = {}
        entries = document.convert("tokens", document.get("tokens", []), tuple[_Entry, ...])
        for number, entry in enumerate(entries):
            path = f"tokens[{number}]"
            if entry.id in self._entries:
                raise document.error(f"{path}.id", f"{entry.id} is given twice")
            self._entries[entry.id] = _checked(document, path, entry)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, static_id: str) -> TokenEntry | None:
        return self._entries.get(static_id)


def token_id(token: str) -> str:
    """The ID of a static token; empty for a text of any other form."""
    found = _TOKEN.fullmatch(token)
    return found[1] if found else ""


def _checked(document: Document, path: str, entry: _Entry) -> TokenEntry:
    try:
        kind, cost, block, parallel, salt, digest = entry.hash.split(":")
        parameters = (int(cost), int(block), int(parallel))
        salt_bytes, digest_bytes = _decode(salt), _decode(digest)
        if kind != "scrypt" or len(salt_bytes) < SALT_BYTES or len(digest_bytes) != HASH_BYTES:
            raise ValueError
        if parameters[0] < COST or math.prod(parameters) > COST_MAX * BLOCK * PARALLEL:
            raise ValueError
        _try_out(parameters)
    except (ValueError, TypeError, OverflowError, MemoryError):
        problem = (
            f"must be scrypt:COST:BLOCK:PARALLEL:SALT:HASH, with a cost of at least {COST} and "
            f"COST * BLOCK * PARALLEL of at most {COST_MAX * BLOCK * PARALLEL}; make one with "
            f"`slatemq access token`"
        )
        raise document.error(f"{path}.hash", problem) from None
    expires_at_s = None if entry.expires is None else entry.expires.timestamp()
    principal = Principal(entry.principal, "token", entry.attributes, expires_at_s)
    return TokenEntry(entry.id, principal, salt_bytes, digest_bytes, parameters)


@lru_cache(maxsize=64)
def _try_out(parameters: tuple[int, int, int]) -> None:
    """Refuse parameters that scrypt cannot have, as `hash_token` does.

    The tokens of a file have the same ones, and trying them out takes as long as checking a token.
    """
    hash_token("", bytes(SALT_BYTES), parameters)


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
