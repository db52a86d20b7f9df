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
from typing import Any, Protocol, TypeVar

from slatemq.textqueue.controls import BYTE_ORDER_MARK, CONTROLS, MARK_ADVICE, State
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import FormatError
from slatemq.textqueue.pages import BEGINNING, NEWLINE, Page, Wishes, last_beginning
from slatemq.textqueue.texts import EVERY, all_texts, is_late, texts_in

CHUNK_BYTES = 1 << 18
"""Read at once; more only inside an entry that is larger."""

TEXTS_BYTES = 1 << 16
"""Read at once for their texts: these fit into the processor's cache together."""

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

_INSIDE = re.compile(rb"\n[ \\\n]")
"""A line that does not begin an entry."""

_FIRST = itemgetter(0)

LONG_BYTES = 100
"""Of lines, among which looking for one byte and then for the next is faster than for both."""

SPARSE_LINES = 10
"""Where less than one line in so many begins a wanted entry, looking for these is faster."""

_BEGIN = "begin the line with - = !"

_LATE_ADVICE = f"move it above the variables, or {_BEGIN} # or \\"

_STRICT_ADVICE = f"{_BEGIN} or #, or with a space if it continues a text"

_UTF8_ADVICE = "save the file as UTF-8 (`iconv -t UTF-8 -f LATIN1`, or whatever it is)"

Read = Callable[[int], bytes]
"""Gives up to so many of the next bytes; none at the end."""

Given = TypeVar("Given", covariant=True)

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
    place = Place(file, offset, line, strict)
    batches = _batches(read, place, settle, hold_back, chunk_bytes, _Entries(controls))
    return chain.from_iterable(batches)


def scan_texts(
    read: Read,
    file: str = "",
    states: Iterable[State] = EVERY,
    *,
    strict: bool = False,
    settle: Settle | None = None,
    hold_back: bool = False,
    chunk_bytes: int = TEXTS_BYTES,
    lines_before: Callable[[int], int],
) -> Iterator[str]:
    """The texts of the entries in these states, and nothing else. Raises FormatError.

    Lines are not counted on the way: for an error, `lines_before` tells how many end before a byte.
    The others as for `scan`.
    """
    place = Place(file, 0, 1, strict)
    batches = _batches(read, place, settle, hold_back, chunk_bytes, _Texts(frozenset(states)))
    return chain.from_iterable(_counted(batches, place, lines_before))


def _counted(
    batches: Iterator[Given], place: Place, lines_before: Callable[[int], int]
) -> Iterator[Given]:
    """The same, with errors that name their lines in the file."""
    try:
        yield from batches
    except FormatError as error:
        raise error.at(place.file, error.line + lines_before(place.counted_from)) from None


@dataclass(slots=True)
class Place:
    """How far a scan is; lines are counted from a byte on that begins one."""

    file: str
    offset: int
    line: int
    strict: bool
    counted_from: int = 0


class _Give(Protocol[Given]):
    """What a scan gives."""

    def many(
        self, piece: memoryview, place: Place, offset: int
    ) -> Iterable[Iterable[Given]] | None:
        """Of whole entries, which begin at that offset; counts their lines.

        Many at once are many times as fast; None if anything in them is wrong.
        """

    def one(self, entry: Entry) -> Iterable[Given]:
        """Of one entry, or nothing."""


def _batches(
    read: Read,
    place: Place,
    settle: Settle | None,
    hold_back: bool,
    chunk_bytes: int,
    give: _Give[Given],
) -> Iterator[Iterable[Given]]:
    buffer, at_end = b"", False
    while True:
        blank = _BLANK.match(buffer)
        position = blank.end() if blank else 0
        place.line += position
        piece = _whole(buffer, position, at_end and not hold_back)
        if piece and not (place.strict and (piece[0] not in _KNOWN or _UNKNOWN.search(piece))):
            given = give.many(piece, place, place.offset + position)
            if given is not None:
                yield from given
                position += len(piece)
        while (found := _ENTRY.match(buffer, position)) is not None:
            end = found.end()
            if end == len(buffer) and (hold_back or not at_end):
                break
            raw = buffer[position:end]
            entry = Entry.of(raw, place.offset + position, place.line)
            _check(entry, place.file, place.strict)
            yield give.one(entry)
            place.line += raw.count(NEWLINE)
            position = end
            if buffer[end : end + 1] == b" ":
                why = "a continuation after a variable"
                raise FormatError(place.file, place.line, 1, why, _LATE_ADVICE)
        if found is None and position < len(buffer):
            what = "continuation" if buffer[position : position + 1] == b" " else "variable"
            why = f"a {what} before any entry"
            raise FormatError(place.file, place.line, 1, why, f"{_BEGIN} or #")
        if at_end:
            return
        place.offset += position
        buffer = buffer[position:]
        more = _read_on(read, settle, max(chunk_bytes, len(buffer)))
        at_end = not more
        buffer += more


def _whole(buffer: bytes, position: int, to_the_end: bool) -> memoryview:
    """Whole entries, without the last one, which may go on; nothing where none begins."""
    end: int | None = position
    if buffer[position : position + 1] not in (b"", b" ", b"\\"):
        end = len(buffer) if to_the_end else last_beginning(buffer, position)
    return memoryview(buffer)[position : position if end is None else end]


class _Entries:
    """Entries that begin with one of these characters; all, if there are none."""

    def __init__(self, controls: bytes) -> None:
        self._controls = controls
        self._wishes = Wishes()
        self._page_bytes = 8

    def many(
        self, piece: memoryview, place: Place, offset: int
    ) -> Iterable[Iterable[Entry]] | None:
        try:
            late = is_late(str(piece, "utf-8"))
        except UnicodeDecodeError:
            return None
        return None if late else self._pages(bytes(piece), place, offset)

    def _pages(self, piece: bytes, place: Place, offset: int) -> Iterator[Iterable[Entry]]:
        start = 0
        while start < len(piece):
            # Small at first: whether texts are wanted is known when one has been asked for.
            self._page_bytes = min(2 * self._page_bytes, PAGE_BYTES)
            beginning = BEGINNING.search(piece, start + self._page_bytes)
            end = beginning.end() if beginning else len(piece)
            page = Page(piece[start:end], offset + start, place.line, self._wishes)
            place.line += page.newlines_count
            yield _given(page, self._controls)
            start = end

    def one(self, entry: Entry) -> Iterable[Entry]:
        return (entry,) if not self._controls or entry.raw[0] in self._controls else ()


class _Texts:
    """The texts of entries in these states."""

    def __init__(self, states: frozenset[State]) -> None:
        self._states = states

    def many(self, piece: memoryview, place: Place, offset: int) -> Iterable[Iterable[str]] | None:
        try:
            texts = texts_in(piece, self._states)
        except UnicodeDecodeError:
            return None
        if texts is None:
            return None
        place.line, place.counted_from = 1, offset + len(piece)
        return (texts,)

    def one(self, entry: Entry) -> Iterable[str]:
        return (entry.text,) if entry.state in self._states else ()


def _given(page: Page, controls: bytes) -> Iterator[Entry]:
    """The entries that are wanted; what is done for each of them alone takes most of the time."""
    content, are_alike = page.content, False
    lines_count = page.newlines_count + (not content.endswith(NEWLINE))
    if len(controls) == 1 and len(content) < LONG_BYTES * lines_count:
        begins = NEWLINE + controls
        found_count = content.count(begins) + 1
        if found_count * SPARSE_LINES < lines_count:
            return _found(content, begins, page.offset, page.line)
        are_alike = found_count == lines_count and content.startswith(controls)
    texts = all_texts(content) if page.wishes.texts else None
    if are_alike:
        return _made(page, range(lines_count), texts)
    if _INSIDE.search(content):
        firsts = content[:1] + b"".join(_CONTROL.findall(content))
    else:
        # Each entry is one line.
        firsts = bytes(map(_FIRST, io.BytesIO(content))) if controls else bytes(lines_count)
    if not controls or (len(controls) == 1 and firsts.count(controls) == len(firsts)):
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
        advice = MARK_ADVICE if entry.control == BYTE_ORDER_MARK else _STRICT_ADVICE
        raise FormatError(file, entry.line, 1, why, advice)
    if problem is not None:
        before = entry.raw[: problem.start]
        line = entry.line + before.count(NEWLINE)
        column = len(before[before.rfind(NEWLINE) + 1 :].decode()) + 1
        raise FormatError(file, line, column, f"not UTF-8: {problem.reason}", _UTF8_ADVICE)
