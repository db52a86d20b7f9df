"""Locks on a queue file: the kernel's, which end with their process.

::

    shared      flock LOCK_SH   reading the last entry; marking and setting variables in place
    exclusive   flock LOCK_EX   appending; compacting; everything under `lock()`
    message     one byte        marking one message, in parallel with marks of others

The shell's `flock FILE COMMAND` takes the first two. A lock is on a file, not on its name: where
the name means another file meanwhile (an editor or a compaction has replaced it), that one is
opened and locked instead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum

from slatemq.textqueue.errors import Busy

FILE_MODE = 0o666

OWN_MODE = 0o600
"""The least mode of files beside a queue: their owner writes to them."""

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""The errors of a refused write."""


class How(IntEnum):
    """The lock of a whole file."""

    NONE = 0
    SHARED = fcntl.LOCK_SH
    EXCLUSIVE = fcntl.LOCK_EX


@contextmanager
def opened(path: str, flags: int, how: How, *, wait: bool = True) -> Iterator[int]:
    """Open and lock a file. Raises Busy (without `wait`), OSError."""
    descriptor = _locked(path, flags, how, wait)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _locked(path: str, flags: int, how: How, wait: bool) -> int:
    while True:
        descriptor = os.open(path, flags | os.O_CLOEXEC, FILE_MODE)
        try:
            if how is How.NONE:
                return descriptor
            fcntl.flock(descriptor, how if wait else how | fcntl.LOCK_NB)
            if is_named(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise Busy(f"{path} is locked by another process or thread") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def opened_beside(path: str, like: os.stat_result | None, *, wait: bool = True) -> Iterator[int]:
    """Open and lock a file beside a queue, and create it if missing. Raises Busy, OSError.

    It gets the permissions of the queue file, if that exists: the same users can read and write it.
    """
    with opened(path, os.O_RDWR | os.O_CREAT, How.EXCLUSIVE, wait=wait) as descriptor:
        status = os.fstat(descriptor)
        if like is not None and status.st_uid == os.geteuid():
            _share(descriptor, status, like)
        yield descriptor


def _share(descriptor: int, value: os.stat_result, like: os.stat_result) -> None:
    mode = stat.S_IMODE(like.st_mode) & FILE_MODE | OWN_MODE
    if stat.S_IMODE(value.st_mode) != mode:
        os.fchmod(descriptor, mode)
    if (value.st_uid, value.st_gid) != (like.st_uid, like.st_gid):
        with suppress(PermissionError):  # not a member of the group
            os.fchown(descriptor, like.st_uid if value.st_uid == 0 else -1, like.st_gid)


def put(descriptor: int, content: bytes, place: int) -> None:
    """Write all of `content`, or nothing where the disk takes only a part. Raises OSError."""
    size = os.fstat(descriptor).st_size
    before = os.pread(descriptor, len(content), place)
    written = os.pwrite(descriptor, content, place)
    if written == len(content):
        return
    # The old bytes have room on the disk.
    os.pwrite(descriptor, before[:written], place)
    if place + written > size:
        os.ftruncate(descriptor, size)
    raise OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes could be written")


def is_named(descriptor: int, path: str) -> bool:
    """Whether the path still names the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def message_lock(descriptor: int, offset: int) -> Iterator[None]:
    """Lock the byte at which a message begins; the descriptor must be open for writing."""
    _lock_byte(descriptor, fcntl.F_WRLCK, offset)
    try:
        yield
    finally:
        _lock_byte(descriptor, fcntl.F_UNLCK, offset)


def _lock_byte(descriptor: int, kind: int, offset: int) -> None:
    # An open file description lock: unlike lockf's it also works between threads, and is not lost
    # when this process closes another descriptor of the file.
    wanted = struct.pack("hhqqi", kind, os.SEEK_SET, offset, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, wanted)
