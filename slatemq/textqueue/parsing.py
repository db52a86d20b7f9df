r"""Bytes to entries, in constant memory: that of a chunk, or of one entry if that is larger.

A line ends with `\n`; `\r` and everything else is text. The only errors are a continuation or a
variable before any entry, a continuation after a variable, bytes that are not UTF-8, and, with
`strict`, unknown control characters.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, count, repeat, starmap
from typing import Any, Generic, TypeVar

from slatemq.textqueue.controls import BYTE_ORDER_MARK, CONTROLS, MARK_ADVICE, STATES, State
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import FormatError
from slatemq.textqueue.pages import (
    EVERY,
    INNER,
    NEWLINE,
    Page,
    UsedProperties,
    is_late,
    last_beginning,
    texts_in,
)

CHUNK_BYTES = 1 << 16
"""Of one read; more only inside a larger entry.

The objects of one chunk fit into the processor's cache. An entry that a program keeps holds as much
in memory."""

PAGE_BYTES_MAX = 1 << 20
"""Of entries with a common page; with more, one is large, and each has its own."""

FIRST_BYTES = 1 << 10
"""Of the first read, before it is known whether the program uses texts."""

# A first line, its continuations, its variables, and the blank lines among and after them. The
# quantifiers are possessive: without backtracking, hostile files cost no more than others.
_ENTRY = re.compile(rb"[^ \\\n][^\n]*+(?:\n++ [^\n]*+)*+(?:\n++\\[^\n]*+)*+\n*+")

_BLANK = re.compile(rb"\n*+")

_KNOWN = "".join(CONTROLS.values()).encode()

_UNKNOWN = re.compile(rb"\n[^ \\\n%b]" % re.escape(_KNOWN))

_BEGIN = "begin the line with - = !"

_SPACE = "it begins with a space: "

_LATE_ADVICE = f"{_SPACE}move it above the variables, or {_BEGIN} # or \\"

STRICT_ADVICE = f"{_BEGIN} or #, or with a space if it continues a text"

_BEGINNING = re.compile(rb"\n[^ \\\n]")

_UTF8_ADVICE = "save the file as UTF-8 (`iconv -t UTF-8 -f LATIN1`, or whatever it is)"

Read = Callable[[int], bytes]
"""Returns up to that many of the next bytes; none at the end."""

Result = TypeVar("Result")

Settle = Callable[[], AbstractContextManager[Any]]
"""Keeps writers away during the block, so that the last entry is complete."""


@dataclass(frozen=True)
class Document:
    """A whole file.

    Attributes:
        leading: Blank lines before the first entry.
        entries: All entries, including unknown ones.
    """

    leading: bytes
    entries: tuple[Entry, ...]

    def dump(self) -> bytes:
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
    """The entries of a file, in its order. Raises FormatError.

    Args:
        read: Returns the bytes.
        file: Its name, for errors.
        offset: Of the first byte read: 0, or where an entry begins.
        line: Of the first byte read.
        strict: Refuse unknown control characters.
        settle: Entered at the end, to wait until the last entry is complete.
        hold_back: Omit the last entry, which a writer may still be writing.
        chunk_bytes: The size of a read.
        controls: Give only entries that begin with one of these; empty: all.
    """
    # A chain runs in C, so that no Python code of ours runs for each entry.
    place = ScanPosition(file, offset, line, strict)
    states = frozenset(STATES.get(control, State.UNKNOWN) for control in controls) or EVERY
    sizes = chain([min(FIRST_BYTES, chunk_bytes)], repeat(chunk_bytes))
    output = _Output[Entry](states, only_texts=False)
    found = chain.from_iterable(_batches(read, place, settle, hold_back, sizes, output))
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
    """Only the texts of the entries in these states. Raises FormatError.

    Lines are not counted on the way: for an error, `lines_before` returns the number that end
    before an offset. The other arguments are those of `scan`.
    """
    place = ScanPosition(file, 0, 1, strict)
    output = _Output[str](frozenset(states), only_texts=True)
    batches = _batches(read, place, settle, hold_back, repeat(chunk_bytes), output)
    return chain.from_iterable(_counted(batches, place, lines_before))


def _counted(
    batches: Iterator[Result], place: ScanPosition, lines_before: Callable[[int], int]
) -> Iterator[Result]:
    """The batches; their errors name their lines in the file."""
    try:
        yield from batches
    except FormatError as error:
        raise error.at(place.file, error.line + lines_before(place.counted_from)) from None


@dataclass(slots=True)
class ScanPosition:
    """How far a scan is; lines are counted from the offset `counted_from`."""

    file: str
    offset: int
    line: int
    strict: bool
    counted_from: int = 0


def _batches(
    read: Read,
    place: ScanPosition,
    settle: Settle | None,
    hold_back: bool,
    sizes: Iterator[int],
    output: _Output[Result],
) -> Iterator[Iterable[Result]]:
    buffer, at_end = b"", False
    while True:
        blank = _BLANK.match(buffer)
        position = blank.end() if blank else 0
        place.line += position
        piece = _whole(buffer, position, at_end and not hold_back)
        if piece and not (place.strict and (piece[0] not in _KNOWN or _UNKNOWN.search(piece))):
            found = output.many(piece, place, place.offset + position)
            if found is not None:
                yield from found
                position += len(piece)
        while (end := _end_of_entry(buffer, position)) is not None:
            if end == len(buffer) and (hold_back or not at_end):
                break
            raw = buffer[position:end]
            entry = Entry.of(raw, place.offset + position, place.line)
            place.line += raw.count(NEWLINE)
            position, is_late_next = end, buffer[end : end + 1] == b" "
            if len(raw) > PAGE_BYTES_MAX:
                # The buffer must not keep another copy while the program has the entry.
                place.offset += end
                buffer, position = buffer[end:], 0
            _check(entry, place.file, place.strict)
            yield output.one(entry)
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
        if len(buffer) > PAGE_BYTES_MAX:
            buffer = _joined_to_the_next(buffer, more, read)
        elif more:
            buffer += more
        del more


def _joined_to_the_next(buffer: bytes, more: bytes, read: Read) -> bytes:
    """A long entry with what follows, joined once, so that it is in memory twice at most."""
    pieces = [buffer]
    while more:
        is_begun = pieces[-1].endswith(NEWLINE) and more[:1] not in INNER
        pieces.append(more)
        if is_begun or _BEGINNING.search(more):
            break
        more = read(PAGE_BYTES_MAX)
    return b"".join(pieces)


def _end_of_entry(buffer: bytes, position: int) -> int | None:
    found = _ENTRY.match(buffer, position)
    return found.end() if found else None


def _whole(buffer: bytes, position: int, to_the_end: bool) -> memoryview:
    """Complete entries, without the last, which may continue; empty where none begins."""
    end: int | None = position
    if buffer[position : position + 1] not in (b"", b" ", b"\\"):
        end = len(buffer) if to_the_end else last_beginning(buffer, position)
    return memoryview(buffer)[position : position if end is None else end]


class _Output(Generic[Result]):
    def __init__(self, states: frozenset[State], *, only_texts: bool) -> None:
        self._states = states
        self._only_texts = only_texts
        self._used = UsedProperties()

    def many(self, piece: memoryview, place: ScanPosition, offset: int) -> Iterable[Any] | None:
        """Of complete entries, which begin at that offset, together; None if any is not valid."""
        if len(piece) > PAGE_BYTES_MAX:
            return None
        texts: list[str] | None = None
        try:
            if self._only_texts or self._used.texts:
                texts = texts_in(piece, self._states)
                if texts is None:
                    return None
            else:
                str(piece, "utf-8")
        except UnicodeDecodeError:
            return None
        if self._only_texts:
            place.line, place.counted_from = 1, offset + len(piece)
            return (texts,)
        page = Page(bytes(piece), offset, place.line, self._states, self._used)
        if texts is not None:
            place.line += page.content.count(NEWLINE)
            return (_with_texts(page, texts),)
        if is_late(page.firsts):
            return None
        place.line += len(page.firsts) - (not page.content.endswith(NEWLINE))
        return (_without_texts(page),)

    def one(self, entry: Entry) -> Iterable[Any]:
        if entry.state not in self._states:
            return ()
        return (entry.text,) if self._only_texts else (entry,)


# Work for each single entry takes most of the time: so it is done without calls.


def _without_texts(page: Page) -> Iterator[Entry]:
    made = starmap(Entry, repeat(()))  # unlimited
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
        # An unfinished write has ended now: its result is read, or nothing.
        with settle():
            more = read(wanted)
    return more


def _check(entry: Entry, file: str, strict: bool) -> None:
    """Raises FormatError for the first error in the entry."""
    problem = _undecodable(entry.raw)
    if strict and entry.state is State.UNKNOWN and (problem is None or problem[0]):
        why = f"unknown control character {entry.control!r}"
        advice = MARK_ADVICE if entry.control == BYTE_ORDER_MARK else STRICT_ADVICE
        raise FormatError(file, entry.line, 1, why, advice)
    if problem is not None:
        start, reason = problem
        before = entry.raw[:start]
        line = entry.line + before.count(NEWLINE)
        column = len(before[before.rfind(NEWLINE) + 1 :].decode()) + 1
        raise FormatError(file, line, column, f"not UTF-8: {reason}", _UTF8_ADVICE)


def _undecodable(raw: bytes) -> tuple[int, str] | None:
    """Where the first bytes are that are not UTF-8, and why; decoded in pieces."""
    decoder = getincrementaldecoder("utf-8")()
    for start in range(0, len(raw), PAGE_BYTES_MAX):
        end = start + PAGE_BYTES_MAX
        kept, _ = decoder.getstate()
        try:
            decoder.decode(raw[start:end], final=end >= len(raw))
        except UnicodeDecodeError as error:
            return start - len(kept) + error.start, error.reason
    return None
