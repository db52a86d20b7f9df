"""Files of notifications: one JSON document, or one on each line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO, Final, NamedTuple

import msgspec

from slatemq.cli.failures import BadInput
from slatemq.errors import InvalidArgument
from slatemq.events import Notifications, read_notifications

DOCUMENT_BYTES_MAX: Final = 16 << 20
"""Bounds our memory; AWS sends at most 256 KiB."""

_OFFSET = re.compile(r"\(byte (\d+)\)")


class Document(NamedTuple):
    """A document's notifications, and the offset in the file of its end."""

    notifications: Notifications
    end: int


def read_documents(stream: BinaryIO, name: str) -> Iterator[Document]:
    """The documents of a file, from its beginning, without its empty lines.

    Raises BadInput, which names the file and the line; OSError.
    """
    stream.seek(0)
    end = number = 0
    is_whole_first = True
    while line := stream.readline(DOCUMENT_BYTES_MAX + 1):
        number += 1
        end += len(line)
        if len(line) > DOCUMENT_BYTES_MAX:
            raise BadInput(f"{name}, line {number}: has more than {DOCUMENT_BYTES_MAX:,} bytes")
        if not line.strip():
            continue
        if is_whole_first and not _is_json(line):
            # Not a document by itself, so it begins a document of several lines.
            yield _read_one(stream, line, name, number, end)
            return
        is_whole_first = False
        yield Document(_read(line, f"{name}, line {number}"), end)


def _is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _read_one(stream: BinaryIO, first: bytes, name: str, number: int, end: int) -> Document:
    rest = stream.read(DOCUMENT_BYTES_MAX - len(first) + 1)
    text = first + rest
    if len(text) > DOCUMENT_BYTES_MAX:
        raise BadInput(
            f"{name}, line {number}: is neither JSON nor the start of a JSON document of at most "
            f"{DOCUMENT_BYTES_MAX:,} bytes"
        )
    try:
        return Document(read_notifications(text), end + len(rest))
    except InvalidArgument as error:
        offset = _OFFSET.search(error.description)
        is_syntax = error.field == "notification"
        lines = text[: int(offset[1])].count(b"\n") if offset and is_syntax else 0
        raise BadInput(f"{name}, line {number + lines}: {error.message}") from error


def _read(line: bytes, where: str) -> Notifications:
    try:
        return read_notifications(line)
    except InvalidArgument as error:
        raise BadInput(f"{where}: {error.message}") from error
