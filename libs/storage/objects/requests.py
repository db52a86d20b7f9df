"""Counts the requests for small objects: a store's client that knows what it has sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError
from obstore.store import ObjectStore

T = TypeVar("T")

_ANSWERS = (
    NotFoundError,
    AlreadyExistsError,
    PreconditionError,
    FileNotFoundError,
    FileExistsError,
)


@dataclass
class RequestCounts:
    """Requests since the start, by kind (get, head, list, put, delete).

    Attributes:
        requests: All of them; a listing counts once for each page.
        errors: Those that ended in an error; that an object is absent, there already or another
            one is an answer, not an error.
        written_bytes: Bytes put.
        read_bytes: Bytes of the objects that were got.
    """

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    written_bytes: int = 0
    read_bytes: int = 0


class CountedStore:
    """The calls of a store that `Objects` makes, each counted."""

    def __init__(self, store: ObjectStore, counts: RequestCounts) -> None:
        self.store = store
        self._counts = counts

    async def get_async(self, path: str) -> Any:
        found = await self._count("get", self.store.get_async(path))
        self._counts.read_bytes += found.meta["size"]
        return found

    async def get_range_async(self, path: str, start: int, end: int) -> bytes:
        found = await self._count("get", self.store.get_range_async(path, start=start, end=end))
        self._counts.read_bytes += end - start
        return bytes(found)

    async def head_async(self, path: str) -> Any:
        return await self._count("head", self.store.head_async(path))

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        written = await self._count("put", self.store.put_async(path, data, **options))
        self._counts.written_bytes += len(data)
        return written

    async def put_pieces(self, path: str, pieces: AsyncIterator[Any], size_bytes: int) -> None:
        """Put an object that arrives in pieces, and has this size; counts as one request."""
        await self._count("put", self.store.put_async(path, pieces))
        self._counts.written_bytes += size_bytes

    async def delete_async(self, path: str) -> None:
        await self._count("delete", self.store.delete_async(path))

    async def list_with_delimiter_async(self, prefix: str) -> Any:
        return await self._count("list", self.store.list_with_delimiter_async(prefix))

    async def list(self, prefix: str, **options: Any) -> AsyncIterator[Sequence[Any]]:
        pages = aiter(self.store.list(prefix, **options))
        while True:
            page = await self._count("list", anext(pages, None))
            if page is None:
                return
            yield page

    async def _count(self, kind: str, request: Awaitable[T]) -> T:
        self._counts.requests[kind] += 1
        try:
            return await request
        except _ANSWERS:
            raise
        except Exception:
            self._counts.errors[kind] += 1
            raise
