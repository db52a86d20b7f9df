"""The XXH3-128 of objects, by which damage is found when they are read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import xxhash

from libs.storage.errors import DamagedObject
from libs.storage.objects.small_objects import Objects, check_digest

DIGEST_CHARACTERS: Final = 32
"""Of a digest in hexadecimal."""

_BRIEF_BYTES: Final = 8 << 20
"""Up to this size a digest is made on the event loop: that takes a millisecond."""


async def digest_of(data: bytes) -> str:
    if len(data) > _BRIEF_BYTES:
        return await asyncio.to_thread(xxhash.xxh3_128_hexdigest, data)
    return xxhash.xxh3_128_hexdigest(data)


async def stored_digest(objects: Objects, path: str) -> str:
    """The digest of an object, however large it is. Raises ObjectNotFound, StoreUnavailable."""
    hashed = xxhash.xxh3_128()
    async for piece in objects.pieces(path):
        hashed.update(piece)
    return hashed.hexdigest()


async def read_checked(path: str, digest: str, read: Callable[[], Awaitable[bytes]]) -> bytes:
    """What `read` gives for the object at this path; raises DamagedObject for any other bytes.

    A store may answer with a part of an object, and it is whole all the same: damage is what is
    read twice.
    """
    data = await read()
    try:
        check_digest(path, digest, await digest_of(data))
    except DamagedObject:
        data = await read()
        check_digest(path, digest, await digest_of(data))
    return data
