"""Removing finished messages: a new file is written beside the old one, and takes its name."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from slatemq.textqueue.appends import appends_after, listing, look, rewrite
from slatemq.textqueue.controls import State
from slatemq.textqueue.editing import reader
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import Rewritten
from slatemq.textqueue.files import QueueFile
from slatemq.textqueue.holders import Hold
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
    """Remove entries in those states. Claims stay valid, at new offsets; ended ones are dropped.

    Raises FormatError, Rewritten (the file was written to without the lock), OSError; then nothing
    was changed.
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
            moved = {holder.offset: holder.offset for holder in holders}
            kept, removed, last = _copy(file, old, new, drop, moved)
            os.fsync(new)
            with listing(file.path, old) as log:
                # Removed messages leave the list; kept ones are in both files.
                made = appends_after(log, new, last, now_ms)
                if _state_of(old) != before or not is_named(old, file.path):
                    raise Rewritten(
                        f"{file.name} was written to without its lock: nothing was done"
                    )
                file.keep_locked(new)
                rewrite(log, made)
            os.rename(written, file.path)
            for holder in holders:
                if holder.state(now_ms) is Hold.ALIVE:
                    holders.change(holder, offset=moved[holder.offset])
                else:
                    holders.drop(holder)
            file.sync_folder()
            return Compacted(kept, removed, before[0], os.fstat(new).st_size)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(written)
            os.close(new)


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


def _copy(
    file: QueueFile, old: int, new: int, drop: Collection[State], moved: dict[int, int]
) -> tuple[int, int, Entry | None]:
    kept = removed = offset = 0
    last: tuple[bytes, int] | None = None
    buffer = bytearray()
    for entry in scan(reader(old), file.name, strict=file.strict):
        if not kept + removed and entry.offset:
            buffer += NEWLINE * entry.offset
        if entry.state in drop:
            removed += 1
            continue
        kept += 1
        if entry.offset in moved:
            moved[entry.offset] = offset + len(buffer)
        last = entry.raw, offset + len(buffer)
        buffer += last[0]
        if len(buffer) >= BUFFER_BYTES:
            _write(new, buffer)
            offset += len(buffer)
            buffer.clear()
    _write(new, buffer)
    return kept, removed, Entry.of(*last) if last else None


def _write(descriptor: int, content: bytearray) -> None:
    with memoryview(content) as rest:
        place = 0
        while place < len(rest):
            place += os.write(descriptor, rest[place:])
