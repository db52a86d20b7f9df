"""Syncs that make finished writes survive a power failure.

A finished PUT of an object store is durable. SlateDB's and obstore's local stores never fsync, so
on `file://` a commit is durable only after a sync of the data folder. On Linux that is one syncfs
for each file system below it, usually one, which covers new files, their folders and renames;
elsewhere it is an fsync of every file that has
changed since the last sync, and of every folder.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Final, Protocol

_FULL_FSYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
"""macOS only, where fsync alone leaves data in the drive's cache."""


NO_SPACE: Final = os.strerror(errno.ENOSPC)

FREE_BYTES_MIN: Final = 64 << 20
"""A table that SlateDB writes may take this much. Of a failed write of its own it does not always
say why."""


PRIVATE_UMASK: Final = 0o077


def write_privately() -> None:
    """Let this process, and those that it starts, write files and folders for its own user alone.

    On `file://` they are the messages.
    """
    os.umask(PRIVATE_UMASK)


class Durability(Protocol):
    """Makes what was written before a call survive a power failure."""

    async def sync(self) -> None:
        """Sync everything in the data folder. Raises OSError."""

    async def sync_file(self, path: Path) -> None:
        """Sync a file below the data folder and the folders above it. Raises OSError."""


class NoSync:
    """For object stores, memory, and measurements of what syncing costs."""

    async def sync(self) -> None:
        """Nothing to do."""

    async def sync_file(self, path: Path) -> None:
        """Nothing to do."""


class BothSyncs:
    """For two stores: the tables of databases, and their WALs."""

    def __init__(self, first: Durability, second: Durability) -> None:
        self._both = (first, second)

    async def sync(self) -> None:
        """Sync all in both. Raises OSError."""
        for one in self._both:
            await one.sync()

    async def sync_file(self, path: Path) -> None:
        """As `sync`: either of them may have the file."""
        await self.sync()


def file_systems(folder: Path) -> list[Path]:
    """A folder on each file system that the data folder is on: itself, then others below it.

    The folder of a shard may be one on which another disk is mounted; those of all shards are at
    most two levels below.
    """
    found = {folder.stat().st_dev: folder}
    for path in sorted([*folder.glob("*/"), *folder.glob("*/*/")]):
        with suppress(FileNotFoundError):  # removed meanwhile
            found.setdefault(path.stat().st_dev, path)
    return list(found.values())


class FolderSync:
    """Linux: a syncfs of each file system of the data folder; concurrent calls share one.

    `sync_file` does the same: an fsync of the file and of each folder above it would commit the
    file system's journal each time, and every writer on it waits for each of those commits.

    Files are written by path. Once another folder is at the path of the data folder, since a disk
    was mounted or unmounted there, say, nothing that is written counts as durable. Nor does it once
    a required file is gone, since the folder was emptied.
    """

    def __init__(self, folder: Path) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._libc = ctypes.CDLL(None, use_errno=True)
        # The system reports what it could not write once to each descriptor, so threads that share
        # one could take the report from each other: the second is for `sync_now`, in turns.
        self._folders = file_systems(folder)
        self._descriptors = [
            [os.open(one, os.O_RDONLY | os.O_DIRECTORY) for one in self._folders] for _ in range(2)
        ]
        self._required: Path | None = None
        self._now = threading.Lock()
        # Numbers of syncs, for the thread that makes them; others only read the first.
        self._begun = self._ended = 0
        self._failure: OSError | None = None

    async def sync(self) -> None:
        """Sync everything in the data folder. Raises OSError.

        After a failure every call raises it: what could not be written is lost, and it is reported
        once.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._sync_after, self._begun)

    async def sync_file(self, path: Path) -> None:
        await self.sync()

    def require(self, file: Path) -> None:
        """From now on, let each sync fail without this file."""
        self._required = file

    def _sync_after(self, begun: int) -> None:
        """Sync, unless a sync that began after number `begun` has ended."""
        if self._ended > begun and self._failure is None:
            return
        self._begun += 1
        self._sync_or_fail(self._descriptors[0])
        self._ended = self._begun

    def sync_now(self) -> None:
        """Like `sync`, for a caller with a thread of its own."""
        with self._now:
            self._sync_or_fail(self._descriptors[1])

    def _sync_or_fail(self, descriptors: Sequence[int]) -> None:
        if self._failure is None:
            try:
                self._sync(descriptors)
            except OSError as error:
                self._failure = error
        # Another thread may have seen the failure, which may concern what this caller wrote.
        if self._failure is not None:
            failure = self._failure
            raise OSError(failure.errno, failure.strerror, failure.filename)

    def _sync(self, descriptors: Sequence[int]) -> None:
        data = str(self._folders[0])
        if not os.path.samestat(os.stat(data), os.fstat(descriptors[0])):
            raise OSError(errno.ESTALE, "another folder is there now, or another disk", data)
        if self._required is not None:
            self._required.stat()
        for folder, descriptor in zip(self._folders, descriptors, strict=True):
            if self._libc.syncfs(descriptor) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number), str(folder))

    def __del__(self) -> None:
        for descriptors in getattr(self, "_descriptors", ()):
            for descriptor in descriptors:
                os.close(descriptor)


class FileSync:
    """Elsewhere: fsync of every file that changed since the last sync, then of every folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="sync")
        self._synced: dict[str, tuple[int, int, int]] = {}

    async def sync(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._sync)

    async def sync_file(self, path: Path) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._sync_file, path)

    def _sync_file(self, path: Path) -> None:
        fsync_path(path)
        folder = path.parent
        while folder != self._folder.parent:
            fsync_path(folder)
            folder = folder.parent

    def _sync(self) -> None:
        seen: dict[str, tuple[int, int, int]] = {}
        folders: list[str] = []
        for folder, _, names in os.walk(self._folder):
            folders.append(folder)
            for name in names:
                path = os.path.join(folder, name)
                try:
                    stat = os.stat(path)
                    mark = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
                    if self._synced.get(path) != mark:
                        fsync_path(Path(path))
                except FileNotFoundError:
                    continue  # removed or renamed meanwhile
                seen[path] = mark
        for folder in folders:
            fsync_path(Path(folder))
        self._synced = seen


def fsync_path(path: Path) -> None:
    """Fsync one file or folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if _FULL_FSYNC is None:
            os.fsync(descriptor)
        else:
            fcntl.fcntl(descriptor, _FULL_FSYNC)
    finally:
        os.close(descriptor)


def durability_of(folder: Path | None, enabled: bool = True) -> Durability:
    """The syncs for a data folder (None: the store is not a local folder)."""
    if folder is None or not enabled:
        return NoSync()
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "syncfs"):
        return FolderSync(folder)
    return FileSync(folder)


def full_disk(folder: Path | None, why: str) -> str:
    """What to do about a full disk, to follow `why` a write failed; empty where it is not full.

    `folder` is the data folder; None where the store is not a local folder.
    """
    if folder is None or f"the disk of {folder}" in why:
        return ""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return ""
    free_bytes = disk.f_bavail * disk.f_frsize
    is_out_of_files = disk.f_files > 0 and disk.f_favail == 0
    if NO_SPACE not in why and free_bytes >= FREE_BYTES_MIN and not is_out_of_files:
        return ""
    what = "no files" if is_out_of_files else f"{free_bytes:,} bytes"
    return (
        f"; {NO_SPACE.lower()}: the disk of {folder} has {what} left: free space on it, or move the"
        " folder to a larger disk"
    )
