r"""Bytes to entries, in constant memory: what is held is a chunk, or one entry if that is larger.

A line is what ends with `\n`; `\r` and everything else is text. The only errors are a
continuation or a variable before any entry, a continuation after a variable, bytes that are not
UTF-8, and, where strictness is asked for, control characters that this version does not know.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, chain, compress, count, repeat
from operator import itemgetter
from typing import Any

from slatemq.textqueue.entries import NEWLINE, Entry, State
from slatemq.textqueue.errors import FormatError

CHUNK_BYTES = 1 << 18
"""Read at once; more only inside an entry that is larger."""

# A first line, its continuations, its variables, and the blank lines among and after them. Nothing
# is ever tried a second way (possessive), so that hostile files cost no more than others.
_ENTRY = re.compile(rb"[^ \\\n][^\n]*+(?:\n++ [^\n]*+)*+(?:\n++\\[^\n]*+)*+\n*+")

_BLANK = re.compile(rb"\n*+")

_BEGINNING = re.compile(rb"\n(?=[^ \\\n])")
"""The newline before an entry. That it is a literal makes searching as fast as memchr."""

_LATE = re.compile(rb"\n\\[^\n]*+\n++ ")
"""A continuation after a variable."""

_FIRST = itemgetter(0)

_INNER = b" \\\n"
"""With what a line does not begin an entry."""

_INSIDE = re.compile(rb"\n[ \\\n]")
"""A line that does not begin an entry."""

SAMPLE_BYTES = 4096

SPARSE_BYTES = 150
"""Where there is less than one wanted entry in so many bytes, looking for them is faster."""

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
    controls: bytes = b"",
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
        controls: Give only entries that begin with one of these; empty: all.
    """
    # A chain runs in C, so that nothing of ours is run for an entry that is given.
    place = Place(file, offset, line, strict, frozenset(controls))
    return chain.from_iterable(_batches(read, place, settle, hold_back, chunk_bytes))


@dataclass(slots=True)
class Place:
    """How far a scan is, and what it gives."""

    file: str
    offset: int
    line: int
    strict: bool
    controls: frozenset[int]


def _batches(
    read: Read, place: Place, settle: Settle | None, hold_back: bool, chunk_bytes: int
) -> Iterator[Iterable[Entry]]:
    buffer, at_end = b"", False
    while True:
        blank = _BLANK.match(buffer)
        position = blank.end() if blank else 0
        place.line += position
        piece = b"" if place.strict else _sound(buffer, position, at_end and not hold_back)
        if piece:
            yield _given(piece, place, place.offset + position)
            position += len(piece)
            place.line += piece.count(NEWLINE)
        while (found := _ENTRY.match(buffer, position)) is not None:
            end = found.end()
            if end == len(buffer) and (hold_back or not at_end):
                break
            entry = Entry(buffer[position:end], place.offset + position, place.line)
            _check(entry, place.file, place.strict)
            if not place.controls or entry.raw[0] in place.controls:
                yield (entry,)
            place.line += entry.raw.count(NEWLINE)
            position = end
            if buffer[end : end + 1] == b" ":
                raise FormatError(place.file, place.line, 1, "a continuation after a variable")
        if found is None and position < len(buffer):
            what = "continuation" if buffer[position : position + 1] == b" " else "variable"
            raise FormatError(place.file, place.line, 1, f"a {what} before any entry")
        if at_end:
            return
        place.offset += position
        buffer = buffer[position:]
        more = _read_on(read, settle, max(chunk_bytes, len(buffer)))
        at_end = not more
        buffer += more


def _sound(buffer: bytes, position: int, to_the_end: bool) -> bytes:
    """What can be cut up all at once, which is many times as fast; nothing if anything is wrong."""
    if buffer[position : position + 1] in (b"", b" ", b"\\"):
        return b""
    end = len(buffer)
    if not to_the_end:
        # The last entry may go on: it begins behind the last newline that ends one.
        while (end := buffer.rfind(NEWLINE, position, end)) >= 0:
            if end + 1 < len(buffer) and buffer[end + 1] not in _INNER:
                end += 1
                break
        else:
            return b""
    piece = buffer[position:end]
    try:
        piece.decode()
    except UnicodeDecodeError:
        return b""
    # A variable has a backslash: most files have none, which is found out fastest.
    return b"" if b"\\" in piece and _LATE.search(piece) else piece


def _given(piece: bytes, place: Place, offset: int) -> Iterator[Entry]:
    """The entries that are wanted, made without running anything of ours for each."""
    if len(place.controls) == 1:
        begins = NEWLINE + bytes(place.controls)
        if piece.count(begins) * SPARSE_BYTES < len(piece):
            return _found(piece, begins, offset, place.line)
    # Where each entry is one line, as the first lines let expect, it is fastest to read lines.
    raws = [] if _INSIDE.search(piece, 0, SAMPLE_BYTES) else io.BytesIO(piece).readlines()
    firsts = bytes(map(_FIRST, raws))
    numbers: Iterator[int] = count(place.line)
    if not raws or len(firsts.translate(None, _INNER)) != len(firsts):
        raws = _BEGINNING.split(piece)
        raws[:-1] = [raw + NEWLINE for raw in raws[:-1]]
        numbers = accumulate(map(bytes.count, raws, repeat(NEWLINE)), initial=place.line)
        firsts = bytes(map(_FIRST, raws)) if place.controls else b""
    offsets = accumulate(map(len, raws), initial=offset)
    fields: Iterable[tuple[bytes, int, int]] = zip(raws, offsets, numbers)  # noqa: B905
    if place.controls:
        fields = compress(fields, map(place.controls.__contains__, firsts))
    return map(tuple.__new__, repeat(Entry), fields)


def _found(piece: bytes, begins: bytes, offset: int, line: int) -> Iterator[Entry]:
    """The entries that are wanted, where they are few: what is between is passed over."""
    counted, start = 0, 0
    if not piece.startswith(begins[1:]):
        start = piece.find(begins) + 1
        if not start:
            return
    while True:
        line += piece.count(NEWLINE, counted, start)
        counted = start
        following = _BEGINNING.search(piece, start)
        end = following.start() + 1 if following else len(piece)
        yield Entry(piece[start:end], offset + start, line)
        start = piece.find(begins, end - 1) + 1
        if not start:
            return


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
