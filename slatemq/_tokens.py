"""Static tokens: how they are made, and how they are hashed.

A token is `smq_<id>_<secret>`. The file of the services has its hash alone: scrypt (RFC 7914).
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

PREFIX: Final = "smq_"
ID_ALPHABET: Final = "abcdefghijkmnpqrstuvwxyz23456789"
ID_LENGTH: Final = 10
SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16
HASH_BYTES: Final = 32

COST, BLOCK, PARALLEL = 16_384, 8, 1
"""Of scrypt: 16 MiB and some 50 ms for each check. The secret has 256 random bits, so guessing it
is out of reach with any hash; the cost is for files whose secrets people chose."""

MEMORY_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class NewToken:
    """A token that was just made.

    Attributes:
        token: For its holder; it is kept nowhere else.
        entry: For the list `tokens` of the services' file.
    """

    token: str
    entry: dict[str, Any]


def new_token(
    principal: str,
    attributes: Mapping[str, str | list[str]] | None = None,
    expires: datetime | None = None,
) -> NewToken:
    """Make a token of 256 random bits. `expires` has a time zone."""
    token_id = "".join(secrets.choice(ID_ALPHABET) for _ in range(ID_LENGTH))
    token = f"{PREFIX}{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    salt = secrets.token_bytes(SALT_BYTES)
    digest = hash_token(token, salt, (COST, BLOCK, PARALLEL))
    entry: dict[str, Any] = {
        "id": token_id,
        "principal": principal,
        "hash": f"scrypt:{COST}:{BLOCK}:{PARALLEL}:{_encode(salt)}:{_encode(digest)}",
    }
    if attributes:
        entry["attributes"] = dict(attributes)
    if expires is not None:
        entry["expires"] = expires.isoformat()
    return NewToken(token, entry)


def hash_token(token: str, salt: bytes, parameters: tuple[int, int, int]) -> bytes:
    """The hash, with this cost, block size and parallelism.

    Raises:
        ValueError, TypeError, OverflowError: scrypt cannot have these parameters, or they take too
            much memory.
    """
    cost, block, parallel = parameters
    return hashlib.scrypt(
        token.encode(),
        salt=salt,
        n=cost,
        r=block,
        p=parallel,
        maxmem=MEMORY_BYTES_MAX,
        dklen=HASH_BYTES,
    )


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
