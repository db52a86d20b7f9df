"""Headers from JSON lines: RFC 6901 pointers, each naming a header by its last segment."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

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
