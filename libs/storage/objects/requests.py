"""Counts the requests for small objects: a store's client that knows what it has sent."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

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


PAGE_OBJECTS: Final = 1_000
"""Objects in the answer to a request that lists, of S3 and of Google; Azure's has up to 5,000."""

PART_BYTES: Final = 5 << 20
"""What is larger is put in parts of this size, the least that S3 takes: by one request for each,
one before them and one after."""


_ADDING: Final = threading.Lock()
"""Jobs of the janitor ask stores in several threads, each with a client of its own."""


@dataclass
class RequestCounts:
    """Requests since the start, by kind (get, head, list, put, delete).

    Attributes:
        requests: All of them, as stores charge for them: a listing by its pages, a large object by
            its parts.
        errors: Those that ended in an error; that an object is absent, there already or another
            one is an answer, not an error.
        written_bytes: Bytes put.
        read_bytes: Bytes of the objects that were got.
    """

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    written_bytes: int = 0
    read_bytes: int = 0

    def add(self, more: RequestCounts) -> None:
        """Count these, too."""
        with _ADDING:
            self.requests.update(more.requests)
            self.errors.update(more.errors)
            self.written_bytes += more.written_bytes
            self.read_bytes += more.read_bytes

    def since(self, earlier: RequestCounts) -> RequestCounts:
        """What came after these were the counts."""
        with _ADDING:
            return RequestCounts(
                self.requests - earlier.requests,
                self.errors - earlier.errors,
                self.written_bytes - earlier.written_bytes,
                self.read_bytes - earlier.read_bytes,
            )


OF_PROCESS: Final = RequestCounts()
"""Those of all clients of this process together."""


class CountedStore:
    """The calls of a store that `Objects` makes, each counted."""

    def __init__(self, store: ObjectStore, counts: RequestCounts) -> None:
        self.store = store
        self._counts = (counts, OF_PROCESS)

    async def get_async(self, path: str) -> Any:
        found = await self._count("get", self.store.get_async(path))
        self._add(RequestCounts(read_bytes=found.meta["size"]))
        return found

    async def get_range_async(self, path: str, start: int, end: int) -> bytes:
        found = await self._count("get", self.store.get_range_async(path, start=start, end=end))
        self._add(RequestCounts(read_bytes=end - start))
        return bytes(found)

    async def head_async(self, path: str) -> Any:
        return await self._count("head", self.store.head_async(path))

    async def put_async(self, path: str, data: bytes, **options: Any) -> Any:
        # What is put on a condition is put whole.
        is_whole = "mode" in options or len(data) <= PART_BYTES
        request = self.store.put_async(path, data, chunk_size=PART_BYTES, **options)
        written = await self._count("put", request, 1 if is_whole else _parts(len(data)) + 2)
        self._add(RequestCounts(written_bytes=len(data)))
        return written

    async def put_pieces(self, path: str, pieces: AsyncIterator[Any], size_bytes: int) -> None:
        """Put an object that arrives in pieces, and has this size."""
        request = self.store.put_async(path, pieces, chunk_size=PART_BYTES)
        await self._count("put", request, _parts(size_bytes) + 2)
        self._add(RequestCounts(written_bytes=size_bytes))

    async def delete_async(self, path: str) -> None:
        await self._count("delete", self.store.delete_async(path))

    async def list_with_delimiter_async(self, prefix: str) -> Any:
        found = await self._count("list", self.store.list_with_delimiter_async(prefix))
        count = len(found["objects"]) + len(found["common_prefixes"])
        self._add(RequestCounts(Counter(list=max(0, (count - 1) // PAGE_OBJECTS))))
        return found

    async def list(self, prefix: str, **options: Any) -> AsyncIterator[Sequence[Any]]:
        pages = aiter(self.store.list(prefix, chunk_size=PAGE_OBJECTS, **options))
        page = await self._count("list", anext(pages, None))
        while page is not None:
            yield page
            # The answer before said whether there is another page: the end takes no request.
            page = await self._count("list", anext(pages, None), 0)
            if page is not None:
                self._add(RequestCounts(Counter(list=1)))

    async def _count(self, kind: str, request: Awaitable[T], requests_count: int = 1) -> T:
        self._add(RequestCounts(Counter({kind: requests_count})))
        try:
            return await request
        except _ANSWERS:
            raise
        except Exception:
            self._add(RequestCounts(errors=Counter({kind: 1})))
            raise

    def _add(self, more: RequestCounts) -> None:
        for counts in self._counts:
            counts.add(more)


def _parts(size_bytes: int) -> int:
    return math.ceil(size_bytes / PART_BYTES)
