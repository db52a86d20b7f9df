"""Locks on a queue file: the kernel's, so that those of a process that dies are gone with it.

::

    shared      flock LOCK_SH   reading the last entry; marking and setting variables in place
    exclusive   flock LOCK_EX   appending; compacting; whatever a caller does under `lock()`
    message     one byte        marking one message, beside others who mark other messages

The first two are what the shell's `flock FILE COMMAND` takes. A lock is on a file, not on its name:
where the name has come to mean another file meanwhile (an editor or a compaction has put a new one
in its place), that one is opened and locked instead.
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
"""Of files beside a queue at least: they are written to by whoever made them."""

READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)
"""How the system refuses to write."""


class How(IntEnum):
    """Of a whole file."""

    NONE = 0
    SHARED = fcntl.LOCK_SH
    EXCLUSIVE = fcntl.LOCK_EX


@contextmanager
def opened(path: str, flags: int, how: How, *, wait: bool = True) -> Iterator[int]:
    """The file of that name, open and locked. Raises Busy (without `wait`), OSError."""
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
            raise Busy(f"{path} is locked by somebody else") from None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def opened_beside(path: str, like: os.stat_result | None, *, wait: bool = True) -> Iterator[int]:
    """A file beside a queue, locked, and made where there is none. Raises Busy, OSError.

    It is for those whom the queue is for, if there is one: who may write that may write this, and
    nobody else reads what is in it.
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
        with suppress(PermissionError):  # a group that we are not in
            os.fchown(descriptor, like.st_uid if value.st_uid == 0 else -1, like.st_gid)


def put(descriptor: int, content: bytes, place: int) -> None:
    """Write all of it there, or, where the disk takes only a part, nothing. Raises OSError."""
    size = os.fstat(descriptor).st_size
    before = os.pread(descriptor, len(content), place)
    written = os.pwrite(descriptor, content, place)
    if written == len(content):
        return
    # What is there has its room on the disk.
    os.pwrite(descriptor, before[:written], place)
    if place + written > size:
        os.ftruncate(descriptor, size)
    raise OSError(errno.ENOSPC, f"only {written} of {len(content)} bytes could be written")


def is_named(descriptor: int, path: str) -> bool:
    """Whether the name still means the open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


@contextmanager
def message_lock(descriptor: int, offset: int) -> Iterator[None]:
    """The byte at which a message begins, for us alone; the descriptor must be open for writing."""
    _lock_byte(descriptor, fcntl.F_WRLCK, offset)
    try:
        yield
    finally:
        _lock_byte(descriptor, fcntl.F_UNLCK, offset)


def _lock_byte(descriptor: int, kind: int, offset: int) -> None:
    # An open file description lock: unlike lockf's it holds between threads as well, and is not
    # lost when this process closes the file somewhere else.
    wanted = struct.pack("hhqqi", kind, os.SEEK_SET, offset, 1, 0)
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, wanted)
