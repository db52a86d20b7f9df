r"""A queue file by its path: reading, appending, changes in place, and the lock of the whole file.

Where both the sidecar and the file are locked, the sidecar is locked first.

Appends do not change what is before the end of the file; but the last entry may be incomplete, and
its writer may be killed. So a reader without a lock goes as far as the file was complete when it
looked, and looks again when it gets there::

    -older\n-newer\n-half of a mess
    ^ read on      ^ sound: wait for the lock, or end
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from slatemq.textqueue.appends import (
    copied,
    finished,
    intended,
    listing,
    look,
    may_lack_others,
    remember,
    rewrite,
    under_way,
)
from slatemq.textqueue.controls import State
from slatemq.textqueue.editing import add, again, end_of, entry_at, reader
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import FormatError, NoSuchEntry, Rewritten
from slatemq.textqueue.holders import Holders, sidecar
from slatemq.textqueue.locks import How, is_named, opened, opened_beside
from slatemq.textqueue.pages import NEWLINE
from slatemq.textqueue.parsing import CHUNK_BYTES, Read, scan, scan_texts

LOOKS_MAX = 100
"""Attempts without a lock while the file keeps growing."""


class Reading:
    """Reads as far as appends are complete. Raises OSError."""

    def __init__(self, path: str, descriptor: int, offset: int, waits: bool) -> None:
        """Without a lock; `waits` means that the caller enters `settle` where `read` ends."""
        self._path = path
        self._descriptor = descriptor
        self._offset = offset
        self._waits = waits
        self._is_over = False
        self._sound = offset
        self._look()

    def read(self, wanted: int) -> bytes:
        if self._offset >= self._sound and not (self._waits or self._is_over):
            self._look()
        wanted = max(0, min(wanted, self._sound - self._offset))
        got = os.pread(self._descriptor, wanted, self._offset)
        self._offset += len(got)
        return got

    @contextmanager
    def settle(self) -> Iterator[None]:
        """Wait for an unfinished append, and keep writers away meanwhile."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        try:
            self._sound = finished(self._path, self._descriptor)
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _look(self) -> None:
        for _ in range(LOOKS_MAX):
            size = os.fstat(self._descriptor).st_size
            begun = under_way(self._path, self._descriptor)
            if size == os.fstat(self._descriptor).st_size:
                break
        else:
            return
        if begun is None:
            self._sound = size
        elif self._waits:
            self._sound = begun
        else:
            # Up to the byte that shows that another entry follows; later bytes may change.
            self._sound, self._is_over = begun + 1, True


T = TypeVar("T")

Signature = tuple[int, ...]
"""Differs after the file was changed."""


class _Own(threading.local):
    """The locks of this thread: descriptors of the file, and the sidecar's."""

    def __init__(self) -> None:
        self.files: list[int] = []
        self.sidecar = -1


class QueueFile:
    """One queue file; any number of threads can use it.

    Attributes:
        path: Absolute, links resolved.
        name: As the caller gave it, for errors.
        fsync: Whether changes are on the disk when a call returns.
        strict: Whether unknown control characters are errors.
    """

    def __init__(self, path: str | os.PathLike[str], fsync: bool, strict: bool) -> None:
        self.name = os.fsdecode(path)
        self.path = os.path.realpath(self.name)  # opening reports circular links
        self.fsync = fsync
        self.strict = strict
        self._own = _Own()

    @contextmanager
    def lock(self, wait: bool = True) -> Iterator[None]:
        """Lock the whole file for this thread. Raises Busy (without `wait`), OSError."""
        if self._own.files:
            yield
            return
        like = self._expect_file()
        with (
            opened_beside(sidecar(self.path), like, wait=wait) as mutex,
            opened(self.path, os.O_RDWR | os.O_CREAT, How.EXCLUSIVE, wait=wait) as descriptor,
        ):
            self._own.files, self._own.sidecar = [descriptor], mutex
            try:
                yield
            finally:
                for kept in self._own.files[1:]:
                    os.close(kept)
                self._own.files = []

    def keep_locked(self, descriptor: int) -> None:
        """If this thread holds the lock, keep a lock also on the new file, which takes the name."""
        if self._own.files:
            self._own.files.append(os.dup(descriptor))

    @contextmanager
    def opened(self, flags: int, how: How) -> Iterator[int]:
        """The file, open, and locked unless this thread has locked it. Raises OSError."""
        if flags & os.O_CREAT:
            self._expect_file()
        else:
            self._existing()
        with opened(self.path, flags, How.NONE if self._own.files else how) as descriptor:
            yield descriptor

    @contextmanager
    def holders(self) -> Iterator[Holders]:
        """The holders of the claims; locked."""
        # Only an existing file gets a sidecar.
        like = self._existing()
        if self._own.files:
            yield self._settled(self._own.sidecar)
            return
        with opened_beside(sidecar(self.path), like) as descriptor:
            yield self._settled(descriptor)

    def _settled(self, descriptor: int) -> Holders:
        holders = Holders(descriptor)
        # By the name, now that no compaction can change it.
        holders.settle(self._existing().st_ino)
        return holders

    def entries(
        self, after: Entry | None = None, *, hold_back: bool = False, controls: bytes = b""
    ) -> Iterator[Entry]:
        """All entries, or those from `after` on, inclusive. Raises FormatError, OSError.

        With `controls`, only those that begin with one of these characters.
        """
        start, line = (after.offset, after.line) if after else (0, 1)

        def scan_from(read: Read, _: int, **others: Any) -> Iterator[Entry]:
            return scan(read, offset=start, line=line, controls=controls, **others)

        return chain.from_iterable(self._scans(scan_from, start, hold_back))

    def texts(self, states: Iterable[State], hold_back: bool) -> Iterator[str]:
        """The texts of entries in these states. Raises FormatError, OSError."""

        def scan_from(read: Read, descriptor: int, **others: Any) -> Iterator[str]:
            lines_before = partial(_newlines_before, descriptor)
            return scan_texts(read, states=states, lines_before=lines_before, **others)

        return chain.from_iterable(self._scans(scan_from, 0, hold_back))

    def _scans(
        self, scan_from: Callable[..., Iterator[T]], start: int, hold_back: bool
    ) -> Iterator[Iterator[T]]:
        self._existing()
        with opened(self.path, os.O_RDONLY, How.NONE) as descriptor:
            if self._own.files:
                finished(self.path, descriptor)
                read, settle = reader(descriptor, start), None
            else:
                reading = Reading(self.path, descriptor, start, waits=not hold_back)
                read, settle = reading.read, None if hold_back else reading.settle
            yield scan_from(
                read,
                descriptor,
                file=self.name,
                strict=self.strict,
                settle=settle,
                hold_back=hold_back,
            )

    def entry(self, offset: int) -> Entry:
        """Raises NoSuchEntry, FormatError, OSError."""
        with self.opened(os.O_RDONLY, How.SHARED) as descriptor:
            if offset >= finished(self.path, descriptor):
                raise NoSuchEntry(f"no entry begins at offset {offset}")
            try:
                return entry_at(descriptor, offset)
            except FormatError as error:
                line = _newlines_before(descriptor, offset) + 1 + error.line
                raise error.at(self.name, line) from None

    def append(
        self,
        content: bytes,
        now_ms: int,
        last: int = 0,
        count: int = 1,
        text: str | None = None,
    ) -> int:
        """Append whole entries; return the offset of the first. Raises OSError.

        There are `count` entries, and the last one begins at `last` in `content`; `text` is its
        text, if known.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        while True:
            is_new = not os.path.lexists(self.path)
            with self.opened(flags, How.EXCLUSIVE) as descriptor:
                # Another process may have created it meanwhile, with the list.
                is_new = is_new and not os.fstat(descriptor).st_size
                if not is_new:
                    look(self.path, self.name, descriptor)
                # Opened first: without it nothing must be appended.
                with listing(self.path, descriptor) as log:
                    if is_new:
                        rewrite(log, [])
                    with intended(log, end_of(descriptor), content):
                        offset = add(descriptor, content)
                        self.sync(descriptor)
                    entry = Entry.of(content[last:], offset + last, text=text)
                    if not is_named(descriptor, self.path):
                        # An editor has replaced the file; what it had read may include this entry.
                        there = copied(self.path, descriptor, entry)
                        if there is None:
                            continue
                        remember(log, there, count, now_ms, is_doubted=True)
                        offset = there.offset - last
                        break
                    # An older copy may have been saved after `look`.
                    is_doubted = may_lack_others(self.path, descriptor, log)
                    remember(log, entry, count, now_ms, is_doubted=is_doubted)
                    break
        if self.fsync and offset == 0:
            self.sync_folder()
        return offset

    def change(self, change: Callable[[int], Entry]) -> Entry:
        """Change an entry in place, and verify it. Raises Rewritten, OSError."""
        with self.opened(os.O_RDWR, How.SHARED) as descriptor:
            changed = change(descriptor)
            self.sync(descriptor)
            self.verify(descriptor, changed)
            return changed

    def verify(self, descriptor: int, changed: Entry) -> None:
        """Raises Rewritten when a change may have gone to a replaced file."""
        if not is_named(descriptor, self.path):
            raise Rewritten(f"{self.name} was replaced while it was being changed: read again")
        again(descriptor, changed)

    def has_all_appends(self) -> bool:
        """Whether all appends are there; warns of AppendLost if not. Raises OSError."""
        with self.opened(os.O_RDONLY, How.SHARED) as descriptor:
            return look(self.path, self.name, descriptor)

    def signature(self) -> Signature:
        """Raises OSError."""
        now = os.stat(self.path)
        return (now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)

    def _existing(self) -> os.stat_result:
        """Raises OSError, also where the file does not exist."""
        status = self._expect_file()
        if status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)
        return status

    def _expect_file(self) -> os.stat_result | None:
        """None where the file does not exist. Raises OSError for a folder, a pipe or a device."""
        try:
            result = os.stat(self.path)
        except FileNotFoundError:
            return None
        if stat.S_ISDIR(result.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), self.name)
        if not stat.S_ISREG(result.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", self.name)
        return result

    def sync(self, descriptor: int) -> None:
        """Write changes to the disk, if `fsync`."""
        if self.fsync:
            os.fsync(descriptor)

    def sync_folder(self) -> None:
        """Write the file's name to the disk."""
        with opened(os.path.dirname(self.path), os.O_RDONLY, How.NONE) as descriptor:
            os.fsync(descriptor)


def _newlines_before(descriptor: int, offset: int) -> int:
    read, count = reader(descriptor), 0
    while offset > 0 and (chunk := read(min(offset, CHUNK_BYTES))):
        offset -= len(chunk)
        count += chunk.count(NEWLINE)
    return count
