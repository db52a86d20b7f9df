r"""Bytes to entries, in constant memory: what is held is a chunk, or one entry if that is larger.

A line is what ends with `\n`; `\r` and everything else is text. The only errors are a
continuation or a variable before any entry, a continuation after a variable, bytes that are not
UTF-8, and, where strictness is asked for, control characters that this version does not know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, count, repeat, starmap
from typing import Any, Protocol, TypeVar

from slatemq.textqueue.controls import BYTE_ORDER_MARK, CONTROLS, MARK_ADVICE, STATES, State
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import FormatError
from slatemq.textqueue.pages import NEWLINE, Page, Wishes, last_beginning
from slatemq.textqueue.texts import EVERY, is_late, texts_in

CHUNK_BYTES = 1 << 16
"""Read at once; more only inside an entry that is larger.

What is made of so much fits into the processor's cache together. As much stays in memory with an
entry that somebody keeps."""

PAGE_BYTES_MAX = 1 << 20
"""Of entries that are kept in memory together: one of more is large, and then each has its own."""

FIRST_BYTES = 1 << 10
"""Read at once at first: whether texts are wanted is known when one has been asked for."""

# A first line, its continuations, its variables, and the blank lines among and after them. Nothing
# is ever tried a second way (possessive), so that hostile files cost no more than others.
_ENTRY = re.compile(rb"[^ \\\n][^\n]*+(?:\n++ [^\n]*+)*+(?:\n++\\[^\n]*+)*+\n*+")

_BLANK = re.compile(rb"\n*+")

_KNOWN = "".join(CONTROLS.values()).encode()

_UNKNOWN = re.compile(rb"\n[^ \\\n%b]" % re.escape(_KNOWN))

_BEGIN = "begin the line with - = !"

_SPACE = "it begins with a space: "

_LATE_ADVICE = f"{_SPACE}move it above the variables, or {_BEGIN} # or \\"

STRICT_ADVICE = f"{_BEGIN} or #, or with a space if it continues a text"

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
    states = frozenset(STATES.get(control, State.UNKNOWN) for control in controls) or EVERY
    sizes = chain([min(FIRST_BYTES, chunk_bytes)], repeat(chunk_bytes))
    found = chain.from_iterable(_batches(read, place, settle, hold_back, sizes, _Entries(states)))
    if controls and State.UNKNOWN in states:
        return (entry for entry in found if entry.raw[0] in controls)
    return found


def scan_texts(
    read: Read,
    file: str = "",
    states: Iterable[State] = EVERY,
    *,
    strict: bool = False,
    settle: Settle | None = None,
    hold_back: bool = False,
    chunk_bytes: int = CHUNK_BYTES,
    lines_before: Callable[[int], int],
) -> Iterator[str]:
    """The texts of the entries in these states, and nothing else. Raises FormatError.

    Lines are not counted on the way: for an error, `lines_before` tells how many end before a byte.
    The others as for `scan`.
    """
    place = Place(file, 0, 1, strict)
    sizes = repeat(chunk_bytes)
    batches = _batches(read, place, settle, hold_back, sizes, _Texts(frozenset(states)))
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
    sizes: Iterator[int],
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
        while (end := _end_of_entry(buffer, position)) is not None:
            if end == len(buffer) and (hold_back or not at_end):
                break
            raw = buffer[position:end]
            entry = Entry.of(raw, place.offset + position, place.line)
            place.line += raw.count(NEWLINE)
            position, is_late_next = end, buffer[end : end + 1] == b" "
            if len(raw) > PAGE_BYTES_MAX:
                # Not in memory once more while somebody has it.
                place.offset += end
                buffer, position = buffer[end:], 0
            _check(entry, place.file, place.strict)
            yield give.one(entry)
            del raw, entry
            if is_late_next:
                why = "a continuation after a variable"
                raise FormatError(place.file, place.line, 1, why, _LATE_ADVICE)
        if end is None and position < len(buffer):
            advice = f"{_BEGIN} or #"
            why = "a variable before any entry"
            if buffer[position : position + 1] == b" ":
                why, advice = "a continuation before any entry", _SPACE + advice
            raise FormatError(place.file, place.line, 1, why, advice)
        if at_end:
            return
        place.offset += position
        buffer = buffer[position:]
        more = _read_on(read, settle, max(next(sizes), len(buffer) // 2))
        at_end = not more
        if more:
            buffer += more
        del more


def _end_of_entry(buffer: bytes, position: int) -> int | None:
    """Where the entry ends that begins there; None where none does."""
    found = _ENTRY.match(buffer, position)
    return found.end() if found else None


def _whole(buffer: bytes, position: int, to_the_end: bool) -> memoryview:
    """Whole entries, without the last one, which may go on; nothing where none begins."""
    end: int | None = position
    if buffer[position : position + 1] not in (b"", b" ", b"\\"):
        end = len(buffer) if to_the_end else last_beginning(buffer, position)
    return memoryview(buffer)[position : position if end is None else end]


class _Entries:
    """Entries in these states."""

    def __init__(self, states: frozenset[State]) -> None:
        self._states = states
        self._wishes = Wishes()

    def many(
        self, piece: memoryview, place: Place, offset: int
    ) -> Iterable[Iterable[Entry]] | None:
        if len(piece) > PAGE_BYTES_MAX:
            return None
        page = Page(bytes(piece), offset, place.line, self._states, self._wishes)
        try:
            if self._wishes.texts:
                texts = texts_in(piece, self._states)
                if texts is None:
                    return None
                place.line += page.content.count(NEWLINE)
                return (_with_texts(page, texts),)
            str(piece, "utf-8")
        except UnicodeDecodeError:
            return None
        if is_late(page.firsts):
            return None
        place.line += len(page.firsts) - (not page.content.endswith(NEWLINE))
        return (_made(page),)

    def one(self, entry: Entry) -> Iterable[Entry]:
        return (entry,) if entry.state in self._states else ()


class _Texts:
    """The texts of entries in these states."""

    def __init__(self, states: frozenset[State]) -> None:
        self._states = states

    def many(self, piece: memoryview, place: Place, offset: int) -> Iterable[Iterable[str]] | None:
        if len(piece) > PAGE_BYTES_MAX:
            return None
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


# What is done for each entry alone takes most of the time: so it is done without any call.


def _made(page: Page) -> Iterator[Entry]:
    made = starmap(Entry, repeat(()))  # without end
    entry: Entry
    for entry, entry._page, entry._place in zip(made, repeat(page), range(page.marks.count(1))):
        yield entry


def _with_texts(page: Page, texts: list[str]) -> Iterator[Entry]:
    made = starmap(Entry, repeat(()))
    entry: Entry
    ready = zip(made, repeat(page), count(), texts)
    for entry, entry._page, entry._place, entry.text in ready:
        yield entry


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
        advice = MARK_ADVICE if entry.control == BYTE_ORDER_MARK else STRICT_ADVICE
        raise FormatError(file, entry.line, 1, why, advice)
    if problem is not None:
        before = entry.raw[: problem.start]
        line = entry.line + before.count(NEWLINE)
        column = len(before[before.rfind(NEWLINE) + 1 :].decode()) + 1
        raise FormatError(file, line, column, f"not UTF-8: {problem.reason}", _UTF8_ADVICE)
