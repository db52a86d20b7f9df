r"""Bytes to entries, in constant memory: what is held is a chunk, or one entry if that is larger.

A line is what ends with `\n`; `\r` and everything else is text. The only errors are a
continuation or a variable before any entry, a continuation after a variable, bytes that are not
UTF-8, and, where strictness is asked for, control characters that this version does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from slatemq.textqueue.entries import NEWLINE, Entry, State
from slatemq.textqueue.errors import FormatError

CHUNK_BYTES = 1 << 18
"""Read at once; more only inside an entry that is larger."""

# A first line, its continuations, its variables, and the blank lines among and after them. Nothing
# is ever tried a second way (possessive), so that hostile files cost no more than others.
_ENTRY = re.compile(rb"[^ \\\n][^\n]*+(?:\n++ [^\n]*+)*+(?:\n++\\[^\n]*+)*+\n*+")

_BLANK = re.compile(rb"\n*+")

Read = Callable[[int], bytes]
"""Gives up to so many of the next bytes; none at the end."""

Settle = Callable[[], AbstractContextManager[Any]]
"""Keeps writers away while it is entered, so that what is at the end is whole."""


@dataclass(frozen=True)
class Document:
    """A whole file.

    Attributes:
        leading: Blank lines before the first entry, as they stand.
        entries: All entries, unknown ones included.
    """

    leading: bytes
    entries: tuple[Entry, ...]

    def dump(self) -> bytes:
        """The bytes that it was read from."""
        return self.leading + b"".join(entry.raw for entry in self.entries)


def parse(content: bytes, file: str = "", *, strict: bool = False) -> Document:
    """The entries of a whole file. Raises FormatError."""
    rest = iter([content])
    entries = tuple(scan(lambda _: next(rest, b""), file, strict=strict))
    leading = content[: entries[0].offset] if entries else content
    return Document(leading, entries)


def scan(
    read: Read,
    file: str = "",
    *,
    offset: int = 0,
    line: int = 1,
    strict: bool = False,
    settle: Settle | None = None,
    hold_back: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[Entry]:
    """Entries as they stand in the file. Raises FormatError.

    Args:
        read: Where the bytes come from.
        file: Its name, for errors.
        offset: Of the first byte read: 0, or where an entry begins.
        line: Of the first byte read.
        strict: Refuse control characters that are not known.
        settle: Entered at the end, to see whether the last entry is whole.
        hold_back: Do not give the last entry, which a writer may still be writing.
        chunk_bytes: How much to read at once.
    """
    buffer, at_end = b"", False
    while True:
        blank = _BLANK.match(buffer)
        position = blank.end() if blank else 0
        line += position
        for raw in [] if strict else _sound(buffer, position, at_end and not hold_back):
            yield Entry(raw, offset + position, line)
            line += raw.count(NEWLINE)
            position += len(raw)
        while (found := _ENTRY.match(buffer, position)) is not None:
            end = found.end()
            if end == len(buffer) and (hold_back or not at_end):
                break
            entry = Entry(buffer[position:end], offset + position, line)
            _check(entry, file, strict)
            yield entry
            line += entry.raw.count(NEWLINE)
            position = end
            if buffer[end : end + 1] == b" ":
                raise FormatError(file, line, 1, "a continuation after a variable")
        if found is None and position < len(buffer):
            what = "continuation" if buffer[position : position + 1] == b" " else "variable"
            raise FormatError(file, line, 1, f"a {what} before any entry")
        if at_end:
            return
        offset += position
        buffer = buffer[position:]
        more = _read_on(read, settle, max(chunk_bytes, len(buffer)))
        at_end = not more
        buffer += more


def _sound(buffer: bytes, position: int, to_the_end: bool) -> list[bytes]:
    """Entries cut out all at once, which is three times as fast; none if anything is wrong."""
    found: list[bytes] = _ENTRY.findall(buffer, position)
    length = sum(map(len, found))
    if length != len(buffer) - position:
        return []
    if found and not to_the_end:
        length -= len(found.pop())
    try:
        buffer[position : position + length].decode()
    except UnicodeDecodeError:
        return []
    return found


def _read_on(read: Read, settle: Settle | None, wanted: int) -> bytes:
    more = read(wanted)
    if not more and settle is not None:
        # A write that was under way is over now: what came of it is read, or there is nothing.
        with settle():
            more = read(wanted)
    return more


def _check(entry: Entry, file: str, strict: bool) -> None:
    """Raises FormatError for what comes first in the entry."""
    problem: UnicodeDecodeError | None = None
    try:
        entry.raw.decode()
    except UnicodeDecodeError as error:
        problem = error
    if strict and entry.state is State.UNKNOWN and (problem is None or problem.start):
        why = f"unknown control character {entry.control!r}"
        raise FormatError(file, entry.line, 1, why)
    if problem is not None:
        before = entry.raw[: problem.start]
        line = entry.line + before.count(NEWLINE)
        column = len(before[before.rfind(NEWLINE) + 1 :].decode()) + 1
        raise FormatError(file, line, column, f"not UTF-8: {problem.reason}")
