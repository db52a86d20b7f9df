"""Removing finished messages: a new file is written beside the old one, and takes its name."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from slatemq.textqueue.appends import appends_after, listing, look, rewrite
from slatemq.textqueue.controls import State
from slatemq.textqueue.editing import reader
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import Rewritten
from slatemq.textqueue.files import QueueFile
from slatemq.textqueue.holders import NOWHERE, Hold, Holders
from slatemq.textqueue.locks import FILE_MODE, How, is_named
from slatemq.textqueue.pages import NEWLINE
from slatemq.textqueue.parsing import scan

BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did."""

    kept_count: int
    removed_count: int
    bytes_before: int
    bytes_after: int


def compact(file: QueueFile, drop: Collection[State], now_ms: int) -> Compacted:
    """Remove entries in those states. Claims of the others stay valid, at new offsets.

    Raises FormatError, Rewritten (the file was written to without the lock), OSError; then the file
    was not changed.
    """
    written = beside(file.path)
    with file.holders() as holders, file.opened(os.O_RDWR, How.EXCLUSIVE) as old:
        look(file.path, file.name, old)
        before = _state_of(old)
        new = os.open(written, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
        try:
            # Before it has the name, so that it cannot be used until the claims have moved.
            fcntl.flock(new, fcntl.LOCK_EX)
            _copy_owner(old, new)
            copy = _Copy(drop, {holder.offset for holder in holders})
            copy.run(file, old, new)
            os.fsync(new)
            with listing(file.path, old) as log:
                # Removed messages leave the list; kept ones are in both files.
                made = appends_after(log, new, copy.last, now_ms)
                if _state_of(old) != before or not is_named(old, file.path):
                    raise Rewritten(
                        f"{file.name} was written to without its lock: nothing was done"
                    )
                file.keep_locked(new)
                rewrite(log, made)
            status = os.fstat(new)
            _plan(holders, copy.places, status.st_ino, now_ms)
            os.rename(written, file.path)
            holders.settle(status.st_ino)
            file.sync_folder()
            return Compacted(copy.kept_count, copy.removed_count, before[0], status.st_size)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(written)
            os.close(new)


def _plan(holders: Holders, places: Mapping[int, _Place], inode: int, now_ms: int) -> None:
    """Drop ended claims, and note the new offsets of the others. Raises OSError."""
    for holder in holders:
        place = places.get(holder.offset)
        if place is None or place.digest != holder.digest:
            place = _Place("", NOWHERE)  # an editor has moved or changed the message
        if place.offset is None or holder.state(now_ms) is not Hold.ALIVE:
            holders.drop(holder)
        else:
            holders.plan(holder, inode, place.offset)
    holders.sync()


def beside(path: str) -> str:
    """The path of the new file; one left by a crash is overwritten."""
    return path + ".compacting"


def _state_of(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def _copy_owner(old: int, new: int) -> None:
    status = os.fstat(old)
    with suppress(PermissionError):
        os.fchown(new, status.st_uid, status.st_gid)
    os.fchmod(new, status.st_mode & 0o7777)


class _Place(NamedTuple):
    """Where a claimed message was copied to; None for one that was removed."""

    digest: str
    offset: int | None


@dataclass(slots=True)
class _Copy:
    """Copies the entries that are kept.

    Attributes:
        drop: The states that are not copied.
        claimed: Offsets in the old file.
        places: For each of these at which an entry begins, what became of it.
        last: The last entry of the new file.
    """

    drop: Collection[State]
    claimed: Collection[int]
    places: dict[int, _Place] = field(default_factory=dict)
    last: Entry | None = None
    kept_count: int = 0
    removed_count: int = 0

    def run(self, file: QueueFile, old: int, new: int) -> None:
        offset, buffer = 0, bytearray()
        last: tuple[bytes, int] | None = None
        for entry in scan(reader(old), file.name, strict=file.strict):
            if not self.kept_count + self.removed_count and entry.offset:
                buffer += NEWLINE * entry.offset
            is_kept = entry.state not in self.drop
            if entry.offset in self.claimed:
                now = offset + len(buffer) if is_kept else None
                self.places[entry.offset] = _Place(entry.digest, now)
            if not is_kept:
                self.removed_count += 1
                continue
            self.kept_count += 1
            last = entry.raw, offset + len(buffer)
            buffer += last[0]
            if len(buffer) >= BUFFER_BYTES:
                _write(new, buffer)
                offset += len(buffer)
                buffer.clear()
        _write(new, buffer)
        self.last = Entry.of(*last) if last else None


def _write(descriptor: int, content: bytearray) -> None:
    with memoryview(content) as rest:
        place = 0
        while place < len(rest):
            place += os.write(descriptor, rest[place:])
