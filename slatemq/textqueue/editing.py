"""Changes of an open file in place: one byte, or the reserved bytes of a variable.

The caller holds the file's lock, shared or exclusive. An entry is found by its offset, and must
still have the same text: what an editor has moved there is never written to.
"""

from __future__ import annotations

import os

from slatemq.textqueue.controls import BYTE_ORDER_MARK, CONTROLS, MARK_ADVICE, State
from slatemq.textqueue.entries import Entry, Variable, checked_line, encoded
from slatemq.textqueue.errors import (
    AlreadyMarked,
    BadText,
    DoesNotFit,
    FormatError,
    NoSuchEntry,
    NotAMessage,
    Rewritten,
)
from slatemq.textqueue.locks import message_lock, put
from slatemq.textqueue.pages import NEWLINE
from slatemq.textqueue.parsing import Read, scan

ENTRY_BYTES = 4096
"""Read first for a single entry; more if it is longer."""

_MARKS = tuple(control.encode() for control in CONTROLS.values())

_CONTINUING = (NEWLINE, b" ", b"\\")
"""How a line begins that belongs to the entry above it."""


def reader(descriptor: int, offset: int = 0) -> Read:
    """Read from that offset on, independently of the file's position."""

    def read(wanted: int) -> bytes:
        nonlocal offset
        got = os.pread(descriptor, wanted, offset)
        offset += len(got)
        return got

    return read


def entry_at(descriptor: int, offset: int) -> Entry:
    """Raises NoSuchEntry, FormatError, with lines counted from there."""
    before = os.pread(descriptor, 1, offset - 1) if offset > 0 else NEWLINE
    first = os.pread(descriptor, 1, offset) if offset >= 0 else b""
    if before != NEWLINE or first in (b"", NEWLINE, b" ", b"\\"):
        raise NoSuchEntry(f"no entry begins at offset {offset}")
    read = reader(descriptor, offset)
    entry = next(scan(read, offset=offset, line=0, chunk_bytes=ENTRY_BYTES), None)
    if entry is None:
        # An editor that saves in place has just emptied the file.
        raise NoSuchEntry(f"no entry begins at offset {offset} any more")
    return entry


def found_at(descriptor: int, offset: int) -> Entry | None:
    """Like `entry_at`; None where no entry can be read."""
    try:
        return entry_at(descriptor, offset)
    except (NoSuchEntry, FormatError):
        return None


def again(descriptor: int, entry: Entry) -> Entry:
    """The entry as it is now. Raises Rewritten when another text is in its place."""
    same = _unchanged(descriptor, entry)
    if same is not None:
        return same
    now = found_at(descriptor, entry.offset)
    if now is None or now.text != entry.text:
        raise Rewritten(f"the entry at offset {entry.offset} is no longer there: read again")
    return Entry.of(now.raw, now.offset, entry.line)


def _unchanged(descriptor: int, entry: Entry) -> Entry | None:
    """The entry without a scan, if all its bytes but the mark are as before; else None."""
    raw, offset = entry.raw, entry.offset
    before = 1 if offset else 0
    read = os.pread(descriptor, before + len(raw) + 1, offset - before)
    following = read[before + len(raw) :]
    is_whole = following not in _CONTINUING if raw.endswith(NEWLINE) else not following
    if not is_whole or (before and not read.startswith(NEWLINE)):
        return None
    # Compared without a copy, because the entry may be long.
    if read.startswith(raw, before):
        return Entry.of(raw, offset, entry.line) if raw[:1] in _MARKS else None
    control = read[before : before + 1]
    if control in _MARKS and read.startswith(raw[1:], before + 1):
        return Entry.of(_with(raw, 0, control), offset, entry.line)
    return None


def _with(raw: bytes, place: int, content: bytes) -> bytes:
    """The bytes of an entry, with `content` written at that place."""
    rest = memoryview(raw)
    return b"".join((rest[:place], content, rest[place + len(content) :]))


def queued(entry: Entry) -> Entry:
    """Raises AlreadyMarked, NotAMessage."""
    if entry.state in (State.PROCESSED, State.ERROR):
        raise AlreadyMarked(entry.offset, entry.control)
    if entry.state is not State.QUEUED:
        raise NotAMessage(f"the entry at offset {entry.offset} is not a message but {_what(entry)}")
    return entry


def _what(entry: Entry) -> str:
    if entry.state is State.COMMENT:
        return "a comment"
    if entry.control == BYTE_ORDER_MARK:
        return f"of an unknown kind: it begins with {MARK_ADVICE}"
    return f"of an unknown kind: it begins with {entry.control!r}"


def mark(descriptor: int, entry: Entry, state: State) -> Entry:
    """Mark a queued message. Raises AlreadyMarked, NotAMessage, Rewritten."""
    with message_lock(descriptor, entry.offset):
        now = queued(again(descriptor, entry))
        control = CONTROLS[state].encode()
        os.pwrite(descriptor, control, entry.offset)
        return Entry.of(_with(now.raw, 0, control), now.offset, now.line)


def fill(descriptor: int, entry: Entry, key: str | int, value: str) -> Entry:
    """Set a variable.

    Raises DoesNotFit, NoSuchVariable, BadText, Rewritten, NotAMessage (for unknown entries).
    """
    with message_lock(descriptor, entry.offset):
        now = again(descriptor, entry)
        if now.state is State.UNKNOWN:
            raise NotAMessage(f"the entry at offset {entry.offset} is {_what(entry)}")
        variable = now.variable(key)
        content = fitted(variable, value)
        put(descriptor, content, variable.offset)
        raw = _with(now.raw, variable.offset - now.offset, content)
        return Entry.of(raw, now.offset, now.line)


def fitted(variable: Variable, value: str) -> bytes:
    """The value, padded to the reserved bytes. Raises DoesNotFit, BadText."""
    content = encoded(checked_line(value, "a value"))
    if variable.name is None and "=" in value:
        raise BadText(f"a variable without a name cannot have '=', which would end one: {value!r}")
    if len(content) > variable.width:
        name = repr(variable.index if variable.name is None else variable.name)
        raise DoesNotFit(name, len(content), variable.width)
    return content.ljust(variable.width)


def end_of(descriptor: int) -> int:
    """Where the next entry begins: after the last newline, which may still be missing."""
    size = os.fstat(descriptor).st_size
    return size + (size > 0 and os.pread(descriptor, 1, size - 1) != NEWLINE)


def add(descriptor: int, content: bytes) -> int:
    """Append whole entries with one write; return the offset of the first.

    The descriptor is open for reading and appending. A last line without a newline gets it in the
    same write. Raises OSError when the disk takes only a part, which is removed.
    """
    missing = NEWLINE * (end_of(descriptor) - os.fstat(descriptor).st_size)
    written = os.write(descriptor, missing + content)
    end = os.lseek(descriptor, 0, os.SEEK_CUR)
    if written != len(missing) + len(content):
        os.ftruncate(descriptor, end - written)
        raise OSError(f"only {written} of {len(missing) + len(content)} bytes could be written")
    return end - len(content)
