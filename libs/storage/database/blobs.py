"""Payloads too large for a record: an object each, below `blobs/`, under a name of its own.

A blob is durable before `put` returns its URI, which the payload record then holds, relative to the
root. So an instance can be copied to another root, and its processes may reach one root by
different URLs.

    blobs/<2 hex>/<30 hex><32 hex>
          └ 16 random bytes ┘└ XXH3-128 of the payload

So a payload that has rotted, was cut off, or took another's place, is never returned: its digest is
in the record, and in the object's own name.
"""

from __future__ import annotations

import re
import secrets
from typing import Final

import xxhash

from libs.storage.database.roots import Root
from libs.storage.errors import DamagedObject, ForeignUri
from libs.storage.objects.digests import DIGEST_CHARACTERS, digest_of, read_checked
from libs.storage.objects.small_objects import check_digest
from slatemq._counts import counted

FOLDER: Final = "blobs"
"""The folder of all blobs; it has 256 folders."""

BLOB_PATH: Final = re.compile(FOLDER + r"/[0-9a-f]{2}/[0-9a-f]{62}", re.ASCII)
"""The path of a blob below the root."""

UPLOAD_AGE_MS_MAX: Final = 60 * 60 * 1000
"""A blob without a record is collected after a day; one that is older than this gets no record any
more, so that it is not collected by a job that saw none."""

_NAME_BYTES: Final = 16


def digest_in(path: str) -> str:
    """The XXH3-128 that the name of a blob has; empty for the path of anything else."""
    return path[-DIGEST_CHARACTERS:] if BLOB_PATH.fullmatch(path) else ""


class Blobs:
    """The payload objects of one root. Every method raises StoreUnavailable."""

    def __init__(self, root: Root) -> None:
        self._objects = root.objects
        self._root_url = root.url

    async def put(self, payload: bytes) -> str:
        """Store `payload` under a new name, durably, and return its URI."""
        name = secrets.token_hex(_NAME_BYTES) + await digest_of(payload)
        # 256 folders: a local folder with millions of entries is slow.
        uri = f"{FOLDER}/{name[:2]}/{name[2:]}"
        await self._objects.put(uri, payload)
        return uri

    async def get(self, uri: str) -> bytes:
        """The payload at `uri`.

        Raises ObjectNotFound, DamagedObject, and ForeignUri for a URI that names no payload.
        """
        path = self.path_of(uri)
        return await read_checked(path, digest_in(path), lambda: self._objects.get(path))

    async def get_slowly(self, uri: str, silence_s: float) -> bytes:
        """Like `get`, however long it takes; TimeoutError when no byte arrives for `silence_s`."""
        path = self.path_of(uri)
        return await read_checked(
            path, digest_in(path), lambda: self._objects.get_slowly(path, silence_s)
        )

    async def check(self, path: str, size_bytes: int) -> None:
        """Read the blob at this path in pieces. Raises ObjectNotFound, and DamagedObject."""
        digest, found_bytes = xxhash.xxh3_128(), 0
        async for piece in self._objects.pieces(path):
            found_bytes += len(piece)
            digest.update(piece)
        if found_bytes != size_bytes:
            raise DamagedObject(
                path, f"it has {counted(found_bytes, 'byte')} instead of {size_bytes:,}"
            )
        check_digest(path, digest_in(path), digest.hexdigest())

    async def stored_ms(self, uri: str) -> int:
        """When the payload was stored, by the store's clock, in ms. Raises the errors of `get`."""
        return await self._objects.modified_ms(self.path_of(uri))

    async def delete(self, uri: str) -> None:
        """Remove the payload; no error if it is gone. Raises ForeignUri."""
        await self._objects.delete(self.path_of(uri))

    def owns(self, uri: str) -> bool:
        """Whether `put` may have returned the URI."""
        try:
            self.path_of(uri)
        except ForeignUri:
            return False
        return True

    def path_of(self, uri: str) -> str:
        """The path below the root. Raises ForeignUri."""
        if not BLOB_PATH.fullmatch(uri):
            raise ForeignUri(uri, self._root_url)
        return uri
