"""Small objects below a root: blobs, topology, probes. Paths use `/` and are relative."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, TypeVar

import xxhash
from obstore import open_reader
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, ObjectStore, S3Store

from libs.storage.errors import DamagedObject, ObjectNotFound, StoreUnavailable, readable
from libs.storage.objects.durability import Durability, full_disk
from libs.storage.objects.patience import patience_s, repeated
from libs.storage.objects.requests import CountedStore, RequestCounts

T = TypeVar("T")

_ATTEMPT_S: Final = 5
_RETRY_S: Final = 10
_RETRIES: Final = 2

_READS: Final = 5
"""Times that a read is tried whose answer breaks off. Each start has some thirty of them."""

_PATIENT_S: Final = 3600
"""The limit of one response that is read in pieces, which the silence between them ends sooner."""

_SILENCE_S: Final = 60
"""How long an object that is read to be checked may give no bytes."""

_PIECE_BYTES: Final = 64 << 10
"""The size of a piece of an object that is read slowly."""

_COPIED_PIECE_BYTES: Final = 8 << 20
"""The size of a piece of an object that is copied; what is smaller is copied whole."""

_COPY_S: Final = 60
_COPIED_BYTES_A_S: Final = 256 << 10
"""A copy may take a minute, and longer for large objects: as long as at 256 KiB a second. So may a
large object that is put at once."""

_SMALL_BYTES: Final = 1 << 20
"""An object above this size that is put or read at once gets time by its size."""

_DELETES_AT_ONCE: Final = 32

_STREAM_BYTES: Final = 1 << 20
"""The size of a piece of an object that is read to be checked."""


class ObjectInfo(NamedTuple):
    """An object in a listing; when it was last written, by the store's clock."""

    path: str
    size_bytes: int
    modified_ms: int


class CopiedObject(NamedTuple):
    """What was copied; the digest is the XXH3-128 of its bytes."""

    size_bytes: int
    digest: str


class Objects:
    """Objects by path. Every method raises StoreUnavailable when the store cannot be used.

    Attributes:
        counts: The requests so far; what `open` reads is not among them.
    """

    def __init__(
        self,
        store: ObjectStore,
        folder: Path | None,
        durability: Durability,
        patient: ObjectStore | None = None,
    ) -> None:
        self.counts = RequestCounts()
        self._store = CountedStore(store, self.counts)
        self._patient = self._store if patient is None else CountedStore(patient, self.counts)
        self._folder = folder
        self._durability = durability

    async def get(self, path: str) -> bytes:
        """Raises ObjectNotFound."""
        data, _ = await self.get_version(path)
        return data

    async def get_slowly(self, path: str, silence_s: float) -> bytes:
        """The object's bytes, however long they take; raises ObjectNotFound.

        Raises TimeoutError when none arrive for `silence_s`. `get` is faster, and times out sooner.
        """
        return b"".join([one async for one in self._pieces(path, _PIECE_BYTES, silence_s)])

    async def pieces(self, path: str) -> AsyncIterator[bytes]:
        """The object's bytes in pieces, for a reader that keeps none. Raises ObjectNotFound."""
        try:
            async for piece in self._pieces(path, _STREAM_BYTES, _SILENCE_S):
                yield piece
        except TimeoutError:
            raise StoreUnavailable(f"reading {path}: no bytes for {_SILENCE_S} s") from None
        except OSError as error:
            raise self._unavailable("reading", path, error) from error

    async def _pieces(
        self, path: str, piece_bytes: int, silence_s: float
    ) -> AsyncGenerator[bytes, None]:
        try:
            async with asyncio.timeout(silence_s):
                found = await self._patient.get_async(path)
            pieces = aiter(found.stream(min_chunk_size=piece_bytes))
            while True:
                async with asyncio.timeout(silence_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                yield bytes(piece)
        except (NotFoundError, FileNotFoundError):
            raise ObjectNotFound(path) from None
        except BaseError as error:
            raise self._unavailable("reading", path, error) from error

    async def copy_to(
        self, path: str, target: Objects, target_path: str, digest: str = ""
    ) -> CopiedObject:
        """Copy an object to another root, durably. Raises ObjectNotFound.

        Raises StoreUnavailable, and writes nothing, where the store gives only a part of it; so it
        raises DamagedObject where its XXH3-128 is not `digest`, if one is given.
        """
        with self._finding("reading", path):
            found = await self._patient.get_async(path)
        size_bytes, hashed = int(found.meta["size"]), xxhash.xxh3_128()
        try:
            async with _in_time("copying", path, size_bytes):
                if size_bytes <= _COPIED_PIECE_BYTES:
                    with self._finding("reading", path):
                        data = bytes(await found.bytes_async())
                    _check_whole(path, len(data), size_bytes)
                    hashed.update(data)
                    check_digest(path, digest, hashed.hexdigest())
                    await target._patient.put_async(target_path, data)
                else:
                    pieces = _whole(path, found, size_bytes, digest, hashed)
                    await target._patient.put_pieces(target_path, pieces, size_bytes)
            await target._sync(target_path)
        except (BaseError, OSError) as error:
            raise target._unavailable("writing", target_path, error) from error
        return CopiedObject(size_bytes, hashed.hexdigest())

    async def get_range(self, path: str, start: int, end: int) -> bytes:
        """The bytes from `start` to before `end`. Raises ObjectNotFound."""
        with self._finding("reading", path):
            return await _whole_answer(lambda: self._store.get_range_async(path, start, end))

    async def put(self, path: str, data: bytes) -> None:
        """Write or replace the object, durably."""
        try:
            await repeated(lambda: self._store.put_async(path, data))
            await self._sync(path)
        except (BaseError, OSError) as error:
            raise self._unavailable("writing", path, error) from error

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write the object, durably, unless there is one. False: there was another one.

        An object with exactly these bytes counts as written: the response to a first attempt may be
        lost, and the store's client then finds what that attempt wrote. So callers that compete for
        a path must each put something of their own into `data`.
        """
        try:
            async with _in_time("creating", path, len(data)):
                store = self._store_for(data)
                await repeated(lambda: store.put_async(path, data, mode="create"))
            await self._sync(path)
        except (AlreadyExistsError, FileExistsError):
            return await self._version_of(path, data) is not None
        except (BaseError, OSError) as error:
            raise self._unavailable("creating", path, error) from error
        return True

    async def _version_of(self, path: str, data: bytes) -> str | None:
        """The tag of the object if it has exactly these bytes, which are durable on return."""
        try:
            async with _in_time("reading", path, len(data)):
                found, tag = await self._get_version(self._store_for(data), path)
            if found != data:
                return None
            await self._sync(path)
        except ObjectNotFound:
            return None
        except OSError as error:
            raise self._unavailable("reading", path, error) from error
        return tag

    async def get_version(self, path: str) -> tuple[bytes, str]:
        """The object's bytes, and the tag of this version. Raises ObjectNotFound."""
        return await self._get_version(self._store, path)

    async def _get_version(self, store: CountedStore, path: str) -> tuple[bytes, str]:
        async def read() -> tuple[bytes, str]:
            found = await store.get_async(path)
            return bytes(await found.bytes_async()), str(found.meta["e_tag"])

        with self._finding("reading", path):
            return await _whole_answer(read)

    def _store_for(self, data: bytes) -> CountedStore:
        return self._patient if len(data) > _SMALL_BYTES else self._store

    async def replace(self, path: str, data: bytes, tag: str) -> str | None:
        """Write the object, durably, if it still has this tag.

        Returns the tag of the new version; None: another caller has changed or removed it. As with
        `put_if_absent`, an object with exactly these bytes counts as written. A folder cannot
        compare and write in one step: of two concurrent writers both may succeed.
        """
        try:
            if self._folder is not None:
                if (await self._store.head_async(path))["e_tag"] != tag:
                    return await self._version_of(path, data)
                written = await self._store.put_async(path, data)
            else:
                written = await repeated(
                    lambda: self._store.put_async(path, data, mode={"e_tag": tag})
                )
            await self._sync(path)
        except PreconditionError:
            return await self._version_of(path, data)
        except (NotFoundError, FileNotFoundError):
            return None
        except (BaseError, OSError) as error:
            raise self._unavailable("replacing", path, error) from error
        return str(written["e_tag"])

    async def list(self, prefix: str, matching: re.Pattern[str] | None = None) -> list[str]:
        """The paths of the objects below the folder `prefix`, sorted: of all, or those that match.

        The pattern is of a whole path: what else has got into a folder is passed over.
        """
        return [info.path for info in await self.describe(prefix, matching=matching)]

    async def last(self, prefix: str, matching: re.Pattern[str]) -> tuple[str, bytes] | None:
        """The last path that `list` gives, with the object's bytes; None where there is none."""
        while paths := await self.list(prefix, matching):
            with suppress(ObjectNotFound):  # A later one was created since, and this one removed.
                return paths[-1], await self.get(paths[-1])
        return None

    async def describe(
        self, prefix: str, after: str | None = None, matching: re.Pattern[str] | None = None
    ) -> Sequence[ObjectInfo]:
        """What `list` gives, of which the names sort after `after`; sorted by path."""
        offset = None if after is None else f"{prefix}/{after}"

        async def read() -> Sequence[Sequence[Any]]:
            return [page async for page in self._store.list(prefix, offset=offset)]

        try:
            pages = await _whole_answer(read)
        except (BaseError, OSError) as error:
            raise self._unavailable("listing", prefix, error) from error
        return sorted(
            ObjectInfo(meta["path"], meta["size"], _ms(meta["last_modified"]))
            for page in pages
            for meta in page
            if matching is None or matching.fullmatch(meta["path"])
        )

    async def has_any(self, prefix: str) -> bool:
        """Whether there is an object below the folder `prefix`: one request, however many."""

        async def read() -> bool:
            return bool(await anext(self._store.list(prefix), None))

        try:
            return await _whole_answer(read)
        except (BaseError, OSError) as error:
            raise self._unavailable("listing", prefix, error) from error

    async def folders(self, prefix: str) -> Sequence[str]:
        """The paths of the folders directly below the folder `prefix`, sorted."""
        try:
            found = await _whole_answer(lambda: self._store.list_with_delimiter_async(prefix))
        except (NotFoundError, FileNotFoundError):
            return []
        except (BaseError, OSError) as error:
            raise self._unavailable("listing", prefix, error) from error
        return sorted(found["common_prefixes"])

    def open(self, path: str) -> BinaryIO:
        """The object as a file that fetches only what is read; blocks.

        Raises ObjectNotFound; reading raises OSError when the store is down.
        """
        with self._finding("opening", path):
            return io.BufferedReader(_ObjectFile(open_reader(self._store.store, path)))

    async def delete(self, path: str) -> None:
        """Remove the object; no error if it is absent."""
        try:
            await repeated(lambda: self._store.delete_async(path))
        except (NotFoundError, FileNotFoundError):
            return
        except (BaseError, OSError) as error:
            raise self._unavailable("deleting", path, error) from error

    async def delete_all(self, paths: Sequence[str]) -> None:
        """Remove the objects, some at a time."""
        for start in range(0, len(paths), _DELETES_AT_ONCE):
            await asyncio.gather(*map(self.delete, paths[start : start + _DELETES_AT_ONCE]))

    async def delete_folder(self, prefix: str) -> None:
        """Delete all below a folder. On file:// it would stay without, and `folders` list it."""
        await self.delete_all(await self.list(prefix))
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder / prefix, ignore_errors=True)

    async def modified_ms(self, path: str) -> int:
        """When the object was last written, by the store's clock, in ms. Raises ObjectNotFound."""
        with self._finding("looking at", path):
            meta = await repeated(lambda: self._store.head_async(path))
        return _ms(meta["last_modified"])

    async def size(self, path: str) -> int:
        """How many bytes the object has. Raises ObjectNotFound."""
        with self._finding("looking at", path):
            return int((await repeated(lambda: self._store.head_async(path)))["size"])

    async def exists(self, path: str) -> bool:
        try:
            await self.size(path)
        except ObjectNotFound:
            return False
        return True

    async def check(self, timeout_s: float) -> None:
        """Raise StoreUnavailable, within `timeout_s`, if the store cannot be read.

        While a process starts, within `patience_s` at least.
        """
        timeout_s = max(timeout_s, patience_s())
        try:
            async with asyncio.timeout(timeout_s):
                await _whole_answer(lambda: self._store.list_with_delimiter_async("topology"))
        except TimeoutError:
            raise StoreUnavailable(f"no answer from the store within {timeout_s:g} s") from None
        except (BaseError, OSError) as error:
            raise self._unavailable("listing", "topology", error) from error

    @contextmanager
    def _finding(self, doing: str, path: str) -> Iterator[None]:
        """Raise ObjectNotFound or StoreUnavailable in place of the store's errors."""
        try:
            yield
        except (NotFoundError, FileNotFoundError):
            raise ObjectNotFound(path) from None
        except (BaseError, OSError) as error:
            raise self._unavailable(doing, path, error) from error

    def _unavailable(self, doing: str, path: str, error: Exception) -> StoreUnavailable:
        why = f"{doing} {path}: {readable(str(error))}"
        return StoreUnavailable(f"{why}{full_disk(self._folder, why)}")

    async def _sync(self, path: str) -> None:
        if self._folder is not None:
            await self._durability.sync_file(self._folder / path)


async def _whole_answer(read: Callable[[], Awaitable[T]]) -> T:
    """What `read` gives, once its answer does not break off; a client repeats all but that."""
    for _ in range(_READS - 1):
        try:
            return await repeated(read)
        except BaseError as error:
            said = str(error)
            if "response body" not in said or "Interrupted" not in said:
                raise
    return await repeated(read)


@asynccontextmanager
async def _in_time(doing: str, path: str, size_bytes: int) -> AsyncIterator[None]:
    """Raises StoreUnavailable where a large object takes longer than the slowest line."""
    try:
        async with asyncio.timeout(_COPY_S + size_bytes / _COPIED_BYTES_A_S):
            yield
    except TimeoutError:
        raise StoreUnavailable(f"{doing} {path}: too slow") from None


async def _whole(
    path: str, found: Any, size_bytes: int, digest: str, hashed: xxhash.xxh3_128
) -> AsyncIterator[Any]:
    """The pieces of what a store gives. A write of them ends without an object where it raises."""
    given = 0
    async for piece in found.stream(min_chunk_size=_COPIED_PIECE_BYTES):
        given += len(piece)
        hashed.update(piece)
        yield piece
    _check_whole(path, given, size_bytes)
    check_digest(path, digest, hashed.hexdigest())


def _check_whole(path: str, given: int, size_bytes: int) -> None:
    """Raises StoreUnavailable."""
    if given != size_bytes:
        raise StoreUnavailable(f"reading {path}: the store gave {given} of {size_bytes} bytes")


def check_digest(path: str, expected: str, found: str) -> None:
    """Raises DamagedObject; where no digest is expected, any will do."""
    if expected not in ("", found):
        raise DamagedObject(path, f"its bytes have the digest {found}, not {expected}")


class _ObjectFile(io.RawIOBase):
    """obstore's reader as a file of Python: seekable and closable."""

    def __init__(self, reader: Any) -> None:
        super().__init__()
        self._reader = reader

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._reader.read(len(buffer))
        except BaseError as error:
            raise OSError(readable(str(error))) from error
        buffer[: len(data)] = memoryview(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._reader.seek(offset, whence))

    def tell(self) -> int:
        return int(self._reader.tell())


def _ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def open_objects(
    scheme: str,
    bucket: str,
    prefix: str,
    folder: Path | None,
    options: Iterable[tuple[str, str]],
    durability: Durability,
) -> Objects:
    """The objects below one root: the same place as SlateDB's store for that root."""
    if folder is not None:
        return Objects(LocalStore(folder), folder, durability)
    if scheme == "memory":
        return Objects(MemoryStore(), None, durability)
    config = dict(options)
    allow_http = config.pop("allow_http", "false") == "true"
    retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    kinds: dict[str, Callable[..., ObjectStore]]
    kinds = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}

    def store(answer_s: int) -> ObjectStore:
        client = {"allow_http": allow_http, "timeout": timedelta(seconds=answer_s)}
        return kinds[scheme](
            bucket, prefix=prefix or None, client_options=client, retry_config=retry, **config
        )

    return Objects(store(_ATTEMPT_S), None, durability, store(_PATIENT_S))
