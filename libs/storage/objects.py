"""Small whole objects below a root: blobs, topology, probes. Paths use `/` and are relative."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Final

from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
from obstore.store import AzureStore, GCSStore, LocalStore, MemoryStore, ObjectStore, S3Store

from libs.storage.durability import Durability
from libs.storage.errors import ObjectNotFound, StoreUnavailable, readable

__all__ = ["Objects", "open_objects"]

_ATTEMPT_S: Final = 5
_RETRY_S: Final = 10
_RETRIES: Final = 2


class Objects:
    """Whole objects by path. Every method raises StoreUnavailable when the store cannot be used."""

    def __init__(self, store: ObjectStore, folder: Path | None, durability: Durability) -> None:
        self._store = store
        self._folder = folder
        self._durability = durability

    async def get(self, path: str) -> bytes:
        """The object's bytes. Raises ObjectNotFound."""
        try:
            found = await self._store.get_async(path)
            return bytes(await found.bytes_async())
        except (NotFoundError, FileNotFoundError):
            raise ObjectNotFound(path) from None
        except BaseError as error:
            raise _unavailable("reading", path, error) from error

    async def put(self, path: str, data: bytes) -> None:
        """Write or replace the object; durable on return."""
        try:
            await self._store.put_async(path, data)
            await self._sync(path)
        except (BaseError, OSError) as error:
            raise _unavailable("writing", path, error) from error

    async def put_if_absent(self, path: str, data: bytes) -> bool:
        """Write the object unless there is one; durable on return. False: there was one."""
        try:
            await self._store.put_async(path, data, mode="create")
            await self._sync(path)
        except (AlreadyExistsError, FileExistsError):
            return False
        except (BaseError, OSError) as error:
            raise _unavailable("creating", path, error) from error
        return True

    async def list(self, prefix: str) -> list[str]:
        """The paths of all objects below the folder `prefix`, sorted."""
        try:
            paths: list[str] = []
            async for page in self._store.list(prefix):
                paths.extend(meta["path"] for meta in page)
        except (BaseError, OSError) as error:
            raise _unavailable("listing", prefix, error) from error
        return sorted(paths)

    async def delete(self, path: str) -> None:
        """Remove the object; no error if it is absent."""
        try:
            await self._store.delete_async(path)
        except (NotFoundError, FileNotFoundError):
            return
        except (BaseError, OSError) as error:
            raise _unavailable("deleting", path, error) from error

    async def modified_ms(self, path: str) -> int:
        """When the object was last written, by the store's clock, in ms. Raises ObjectNotFound."""
        try:
            meta = await self._store.head_async(path)
        except (NotFoundError, FileNotFoundError):
            raise ObjectNotFound(path) from None
        except (BaseError, OSError) as error:
            raise _unavailable("looking at", path, error) from error
        return int(meta["last_modified"].timestamp() * 1000)

    async def check(self, timeout_s: float) -> None:
        """Raises StoreUnavailable, within `timeout_s`, if the store cannot be read."""
        try:
            await asyncio.wait_for(self._store.list_with_delimiter_async("topology"), timeout_s)
        except TimeoutError:
            raise StoreUnavailable(f"no answer from the store within {timeout_s:g} s") from None
        except (NotFoundError, FileNotFoundError) as error:
            raise _unavailable("listing", "topology", error) from error
        except (BaseError, OSError) as error:
            raise _unavailable("listing", "topology", error) from error

    async def _sync(self, path: str) -> None:
        if self._folder is not None:
            await self._durability.sync_file(self._folder / path)


def _unavailable(doing: str, path: str, error: Exception) -> StoreUnavailable:
    return StoreUnavailable(f"{doing} {path}: {readable(str(error))}")


def open_objects(
    scheme: str,
    bucket: str,
    prefix: str,
    folder: Path | None,
    options: Iterable[tuple[str, str]],
    durability: Durability,
) -> Objects:
    """The objects below one root; the same place that SlateDB's store for that root names."""
    if folder is not None:
        return Objects(LocalStore(folder), folder, durability)
    if scheme == "memory":
        return Objects(MemoryStore(), None, durability)
    config = dict(options)
    allow_http = config.pop("allow_http", "false") == "true"
    client = {"allow_http": allow_http, "timeout": timedelta(seconds=_ATTEMPT_S)}
    retry = {"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_RETRY_S)}
    kinds = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
    store = kinds[scheme](
        bucket, prefix=prefix or None, client_options=client, retry_config=retry, **config
    )
    return Objects(store, None, durability)
