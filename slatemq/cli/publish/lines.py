"""A file of lines as batches of messages, in constant memory, and headers from JSON lines.

A batch ends where the line number is a multiple of `BATCH_LINES`, or earlier where the next line
would take it over `BATCH_BYTES`. So a run that starts at the end of a batch cuts the same batches
as the run that it continues, and can give them the same request IDs.

Headers are found by RFC 6901 pointers, each naming a header by its last segment.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple, NoReturn

from slatemq._counts import counted
from slatemq.cli.failures import BadInput
from slatemq.cli.publish.plain_text import publish_problem
from slatemq.models import OutgoingMessage

HEADER_BYTES_MAX = 65_535
"""Of a key and of a value."""

_INDEX = re.compile(r"0|[1-9][0-9]*", re.ASCII)
_BAD_ESCAPE = re.compile(r"~(?![01])")


class Pointer(NamedTuple):
    """Where to look, as unescaped segments; the last one is the header's name."""

    text: str
    segments: tuple[str, ...]

    @property
    def header(self) -> str:
        return self.segments[-1]


class NoHeader(ValueError):
    """A line has no usable header; the message says why."""


class _Number(str):
    __slots__ = ()


_MISSING = object()


def parse_pointers(texts: Iterable[str]) -> list[Pointer]:
    """Pointers from lists such as `/type,/user/region`. Raises ValueError."""
    pointers: dict[str, Pointer] = {}
    for text in (part for given in texts for part in given.split(",")):
        pointer = _parse_pointer(text)
        other = pointers.setdefault(pointer.header, pointer)
        if other is not pointer:
            raise ValueError(
                f"{other.text} and {text} both make the header {pointer.header!r}: leave one out"
            )
    return list(pointers.values())


def _parse_pointer(text: str) -> Pointer:
    if not text.startswith("/"):
        raise ValueError(f"{text!r} is not a valid JSON pointer: begin it with /, e.g. /type")
    if _BAD_ESCAPE.search(text):
        raise ValueError(f"{text!r} is not a valid JSON pointer: write ~0 for ~, and ~1 for /")
    segments = [part.replace("~1", "/").replace("~0", "~") for part in text[1:].split("/")]
    if not 1 <= len(segments[-1].encode()) <= HEADER_BYTES_MAX:
        raise ValueError(f"{text!r} names no header: its last segment must have 1 to 65,535 bytes")
    return Pointer(text, tuple(segments))


def headers_from(line: bytes, pointers: Sequence[Pointer]) -> dict[str, str]:
    """The headers that the pointers find in a line of JSON.

    Strings are taken as they are, numbers, true and false as they are written; a missing value or
    null makes no header. Raises NoHeader for an object or array, and for a line that is not JSON.
    """
    document = _parse(line)
    headers: dict[str, str] = {}
    for pointer in pointers:
        found = _find(document, pointer.segments)
        if found is _MISSING or found is None:
            continue
        headers[pointer.header] = _text(found, pointer)
    return headers


def _text(found: Any, pointer: Pointer) -> str:
    if isinstance(found, bool):
        return "true" if found else "false"
    if not isinstance(found, str):
        kind = "an object" if isinstance(found, dict) else "an array"
        raise NoHeader(f"{pointer.text} is {kind}; a header is text, a number, true or false")
    text = str(found)
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise NoHeader(f"{pointer.text} has a lone surrogate, which is not valid text") from None
    if length > HEADER_BYTES_MAX:
        raise NoHeader(f"{pointer.text} has {length} bytes; a header has at most 65,535")
    return text


def _refuse(constant: str) -> NoReturn:
    raise NoHeader(f"is not JSON, which has no {constant}")


def _parse(line: bytes) -> Any:
    try:
        # utf-8-sig: a file may begin with a byte order mark, which is not part of the JSON.
        text = line.decode("utf-8-sig")
        return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise NoHeader(f"is not UTF-8 at byte {error.start + 1}") from None
    except RecursionError:
        raise NoHeader("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise NoHeader(f"is not JSON: {error.msg} at column {error.colno}") from None


def _find(document: Any, segments: Sequence[str]) -> Any:
    found = document
    for segment in segments:
        if isinstance(found, dict):
            found = found.get(segment, _MISSING)
        elif isinstance(found, list) and _INDEX.fullmatch(segment) and len(segment) < 10:
            place = int(segment)
            found = found[place] if place < len(found) else _MISSING
        else:
            return _MISSING
    return found


BATCH_LINES = 1000

BATCH_BYTES = 4 << 20

LINE_BYTES_MAX = 64 << 20
"""The largest payload of an instance unless set otherwise; bounds our memory."""

HEADERS_MAX = 255

SKIP_BYTES = 1 << 20

PLAIN = OutgoingMessage(b"")


class LineError(BadInput):
    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"line {number}: {why}")
        self.number = number


class TooFewLines(BadInput):
    """The file ends before the line to continue from."""


class Batch(NamedTuple):
    """Consecutive lines, as messages.

    Attributes:
        first: Number of its first line, counted from 1.
        messages: One for each line.
        payload_bytes: Of all payloads and headers together.
        source_bytes: Of the lines in the file, newlines included.
    """

    first: int
    messages: list[OutgoingMessage]
    payload_bytes: int
    source_bytes: int

    @property
    def last(self) -> int:
        return self.first + len(self.messages) - 1


@dataclass
class LineReader:
    """Makes messages of lines: a line ends with a newline (0x0A) and nothing else.

    Attributes:
        stream: Where the lines come from.
        template: Every message but for its payload.
        pointers: Where in the line further headers are; without any, lines are not parsed.
        has_keys: Whether payloads will be encrypted.
        position: Lines read so far.
        found: The headers that some line has had by the pointers.
    """

    stream: BinaryIO
    template: OutgoingMessage = PLAIN
    pointers: Sequence[Pointer] = ()
    has_keys: bool = False
    position: int = 0
    found: set[str] = field(default_factory=set)
    _held: tuple[OutgoingMessage, int] | None = None

    def skip(self, count: int) -> int:
        """Skip lines up to that number; return their bytes. Raises TooFewLines."""
        passed = 0
        while self.position < count:
            part = self.stream.readline(SKIP_BYTES)
            if not part:
                raise TooFewLines(
                    f"--skip {count} is beyond the end: the input has only "
                    f"{counted(self.position, 'line')}"
                )
            passed += len(part)
            while not part.endswith(b"\n") and (part := self.stream.readline(SKIP_BYTES)):
                passed += len(part)
            self.position += 1
        return passed

    def next_batch(self) -> Batch | None:
        """The next batch; None at the end. Raises LineError, OSError."""
        first = self.position + 1
        messages: list[OutgoingMessage] = []
        total = source = 0
        while not messages or self.position % BATCH_LINES:
            taken = self._held or self._read(self.position + 1)
            if taken is None:
                break
            message, length = taken
            size = _size(message)
            if messages and total + size > BATCH_BYTES:
                self._held = taken
                break
            self._held = None
            messages.append(message)
            self.position += 1
            total += size
            source += length
        return Batch(first, messages, total, source) if messages else None

    def _read(self, number: int) -> tuple[OutgoingMessage, int] | None:
        """The next line's message, and the line's length in the file."""
        line = self.stream.readline(LINE_BYTES_MAX + 2)
        if not line:
            return None
        payload = line.removesuffix(b"\n")
        if len(payload) > LINE_BYTES_MAX:
            raise LineError(number, f"is longer than {LINE_BYTES_MAX:,} bytes")
        headers = self.template.headers
        if self.pointers:
            try:
                of_line = headers_from(payload, self.pointers)
            except NoHeader as error:
                raise LineError(number, str(error)) from None
            self.found.update(of_line)
            headers = {**headers, **of_line}
            if len(headers) > HEADERS_MAX:
                raise LineError(number, f"has {len(headers)} headers; a message has at most 255")
        problem = publish_problem(payload, headers, self.has_keys)
        if problem:
            raise LineError(number, problem)
        message = OutgoingMessage(payload, headers, *self.template[2:])
        return message, len(line)


def _size(message: OutgoingMessage) -> int:
    return len(message.payload) + sum(
        len(key.encode()) + len(value.encode()) for key, value in message.headers.items()
    )
