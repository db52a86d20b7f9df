"""Payloads too large for a record: an object each, below `blobs/`, under a random name.

A blob is durable before `put` returns its URI, which the payload record then holds:
`blobs/<2 hex>/<30 hex>`, relative to the root. So an instance can be copied to another root, and
its processes may reach one root by different URLs.
"""

from __future__ import annotations

import secrets
from typing import Final

from libs.storage.database.roots import Root
from libs.storage.errors import ForeignUri

FOLDER: Final = "blobs"
"""The folder of all blobs; it has 256 folders."""

_NAME_BYTES: Final = 16
_HEX: Final = frozenset("0123456789abcdef")


class Blobs:
    """The payload objects of one root. Every method raises StoreUnavailable."""

    def __init__(self, root: Root) -> None:
        self._objects = root.objects
        self._root_url = root.url

    async def put(self, payload: bytes) -> str:
        """Store `payload` under a new name, durably, and return its URI."""
        name = secrets.token_hex(_NAME_BYTES)
        # 256 folders: a local folder with millions of entries is slow.
        uri = f"{FOLDER}/{name[:2]}/{name[2:]}"
        await self._objects.put(uri, payload)
        return uri

    async def get(self, uri: str) -> bytes:
        """The payload at `uri`. Raises ObjectNotFound, and ForeignUri for what is no payload's."""
        return await self._objects.get(self._path(uri))

    async def get_slowly(self, uri: str, silence_s: float) -> bytes:
        """As `get`, however long it takes; TimeoutError when no byte arrives for `silence_s`."""
        return await self._objects.get_slowly(self._path(uri), silence_s)

    async def stored_ms(self, uri: str) -> int:
        """When the payload was stored, by the store's clock, in ms. Raises the errors of `get`."""
        return await self._objects.modified_ms(self._path(uri))

    async def delete(self, uri: str) -> None:
        """Remove the payload; no error if it is gone. Raises ForeignUri."""
        await self._objects.delete(self._path(uri))

    def owns(self, uri: str) -> bool:
        """Whether `put` may have returned the URI."""
        try:
            self._path(uri)
        except ForeignUri:
            return False
        return True

    def _path(self, uri: str) -> str:
        parts = uri.split("/")
        ours = len(parts) == 3 and parts[0] == FOLDER
        if not ours or not all(set(part) <= _HEX and part for part in parts[1:]):
            raise ForeignUri(uri, self._root_url)
        return uri
