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
from itertools import chain, compress, repeat, starmap
from operator import itemgetter
from typing import Any

from slatemq.textqueue.entries import CONTROLS, Entry, State
from slatemq.textqueue.errors import FormatError
from slatemq.textqueue.pages import BEGINNING, NEWLINE, Page, Wishes, last_beginning, texts_of

CHUNK_BYTES = 1 << 18
"""Read at once; more only inside an entry that is larger."""

PAGE_BYTES = 1 << 14
"""Of a page, and hardly more. As much stays in memory with an entry that somebody keeps."""

# A first line, its continuations, its variables, and the blank lines among and after them. Nothing
# is ever tried a second way (possessive), so that hostile files cost no more than others.
_ENTRY = re.compile(rb"[^ \\\n][^\n]*+(?:\n++ [^\n]*+)*+(?:\n++\\[^\n]*+)*+\n*+")

_BLANK = re.compile(rb"\n*+")

_CONTROL = re.compile(rb"\n([^ \\\n])")
"""With which an entry begins. A literal first: searching is then as fast as memchr."""

_KNOWN = "".join(CONTROLS.values()).encode()

_UNKNOWN = re.compile(rb"\n[^ \\\n%b]" % re.escape(_KNOWN))

_LATE = re.compile(rb"\n\\[^\n]*+\n++ ")
"""A continuation after a variable."""

_INSIDE = re.compile(rb"\n[ \\\n]")
"""A line that does not begin an entry."""

_FIRST = itemgetter(0)

SPARSE_LINES = 10
"""Where less than one line in so many begins a wanted entry, looking for these is faster."""

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
    place = Place(file, offset, line, strict, controls, Wishes())
    return chain.from_iterable(_batches(read, place, settle, hold_back, chunk_bytes))


@dataclass(slots=True)
class Place:
    """How far a scan is, and what it gives."""

    file: str
    offset: int
    line: int
    strict: bool
    controls: bytes
    wishes: Wishes
    page_bytes: int = 8


def _batches(
    read: Read, place: Place, settle: Settle | None, hold_back: bool, chunk_bytes: int
) -> Iterator[Iterable[Entry]]:
    buffer, at_end = b"", False
    while True:
        blank = _BLANK.match(buffer)
        position = blank.end() if blank else 0
        place.line += position
        piece = _sound(buffer, position, at_end and not hold_back, place.strict)
        for page in _pages(piece, place, place.offset + position):
            yield _given(page, place.controls)
        position += len(piece)
        while (found := _ENTRY.match(buffer, position)) is not None:
            end = found.end()
            if end == len(buffer) and (hold_back or not at_end):
                break
            raw = buffer[position:end]
            entry = Entry.of(raw, place.offset + position, place.line)
            _check(entry, place.file, place.strict)
            if not place.controls or raw[0] in place.controls:
                yield (entry,)
            place.line += raw.count(NEWLINE)
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


def _sound(buffer: bytes, position: int, to_the_end: bool, strict: bool) -> bytes:
    """What can be cut up all at once, which is many times as fast; nothing if anything is wrong."""
    if buffer[position : position + 1] in (b"", b" ", b"\\"):
        return b""
    # The last entry may go on.
    end = len(buffer) if to_the_end else last_beginning(buffer, position)
    piece = buffer[position:end] if end is not None else b""
    if not piece:
        return b""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return b""
    if strict and (piece[0] not in _KNOWN or _UNKNOWN.search(piece)):
        return b""
    # A variable has a backslash: most files have none, which is found out fastest.
    return b"" if b"\\" in piece and _LATE.search(piece) else piece


def _pages(piece: bytes, place: Place, offset: int) -> Iterator[Page]:
    start = 0
    while start < len(piece):
        # Small at first: whether texts are wanted is known when one has been asked for.
        place.page_bytes = min(2 * place.page_bytes, PAGE_BYTES)
        beginning = BEGINNING.search(piece, start + place.page_bytes)
        end = beginning.end() if beginning else len(piece)
        page = Page(piece[start:end], offset + start, place.line, place.wishes)
        place.line += page.newlines_count
        yield page
        start = end


def _given(page: Page, controls: bytes) -> Iterator[Entry]:
    """The entries that are wanted; what is done for each of them alone takes most of the time."""
    content, texts = page.content, None
    text = content.decode().removesuffix("\n") if page.wishes.texts else ""
    lines_count = page.newlines_count + (not content.endswith(NEWLINE))
    if len(controls) == 1:
        begins = NEWLINE + controls
        texts = text[1:].split(begins.decode()) if text else None
        found_count = len(texts) if texts else content.count(begins) + 1
        if found_count * SPARSE_LINES < lines_count:
            return _found(content, begins, page.offset, page.line)
        if found_count == lines_count and content.startswith(controls):
            return _made(page, range(found_count), texts)
    if _INSIDE.search(content):
        firsts = content[:1] + b"".join(_CONTROL.findall(content))
        texts = texts_of(text) if text else None
    else:
        # Each entry is one line.
        firsts = bytes(map(_FIRST, io.BytesIO(content))) if controls else bytes(lines_count)
        texts = [line[1:] for line in text.split("\n")] if text else None
    if not controls:
        return _made(page, range(len(firsts)), texts)
    wanted = list(map(controls.__contains__, firsts))
    places = compress(range(len(firsts)), wanted)
    return _made(page, places, compress(texts, wanted) if texts else None)


def _made(page: Page, places: Iterable[int], texts: Iterable[str] | None) -> Iterator[Entry]:
    made = starmap(Entry, repeat(()))  # without end
    entry: Entry
    if texts is None:
        for entry, entry._page, entry._place in zip(made, repeat(page), places):
            yield entry
    else:
        ready = zip(made, repeat(page), places, texts)
        for entry, entry._page, entry._place, entry.text in ready:
            yield entry


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
        following = BEGINNING.search(piece, start)
        end = following.start() + 1 if following else len(piece)
        yield Entry.of(piece[start:end], offset + start, line)
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
