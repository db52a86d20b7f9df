r"""What editors on Windows make of a file: line ends of their own (CRLF), a byte order mark.

In a queue file a carriage return is text like any other, so each line of such a file has one too
much: `\id=17` has become `\id=17\r`. We never write one at the end of these variables, so it shows.
A mark makes the first line one of an unknown kind, which nobody acts on.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slatemq.cli.failures import BadInput
from slatemq.cli.tq.input import begins_with_mark, marked
from slatemq.textqueue import Entry, State, TextQueue
from slatemq.textqueue.controls import BYTE_ORDER_MARK

CRLF = b"\r\n"

_OURS = frozenset(
    {"id", "handle", "etag", "content", "encoding", "retention", "created_at", "settled"}
    | {"slatemq", "session", "header-json"}
)
"""Variables that an export writes, and that mean something when they are read again."""

_HEADER = "header."


class WindowsLines(BadInput):
    """The file has Windows line ends; the message says where, and what to do."""


def expect_none(entry: Entry, file: str) -> None:
    """Raises WindowsLines where a variable of ours ends with a carriage return."""
    if b"\r" not in entry.raw:
        return
    for variable in entry.variables:
        name = variable.name or ""
        if variable.value.endswith("\r") and (name in _OURS or name.startswith(_HEADER)):
            raise WindowsLines(
                f"{file}:{entry.line_of(variable)}: the variable {name} ends with a carriage "
                "return: the file was saved with Windows line ends (CRLF). Save it with those of "
                "Unix: `:set ff=unix` in vi, LF at the bottom of VS Code's window, or `dos2unix`. "
                "(A header that is to end with one is written as header-json.)"
            )


def expect_none_in(file: str) -> None:
    """The same for each entry of a file, and for a byte order mark before them.

    Raises FormatError, OSError, too.
    """
    if begins_with_mark(file):
        raise BadInput(f"{file}:1: {marked(file)}")
    for entry in TextQueue(file).entries(*State):
        expect_none(entry, file)


def has_any(path: Path) -> bool:
    """Whether a line of the file ends so."""
    with path.open("rb") as lines:
        return any(line.endswith(CRLF) for line in lines)


def mark_taken_out(path: Path) -> bool:
    """Take out the byte order mark at the file's beginning; whether there was one."""
    if not begins_with_mark(path):
        return False
    with path.open("rb") as stream, _instead_of(path) as whole:
        stream.seek(len(BYTE_ORDER_MARK.encode()))
        shutil.copyfileobj(stream, whole)
    return True


def taken_back(path: Path) -> bool:
    """Make all line ends those of Unix again, if all are those of Windows; whether they were.

    That loses nothing of a file which had none of them before it was edited.
    """
    with path.open("rb") as lines:
        # The last line may have no end.
        begins_so = next(lines, b"").endswith(CRLF)
        if not begins_so or any(not line.endswith(CRLF) for line in lines if line.endswith(b"\n")):
            return False
    with path.open("rb") as lines, _instead_of(path) as whole:
        for line in lines:
            whole.write(line.removesuffix(CRLF) + b"\n" if line.endswith(CRLF) else line)
    return True


@contextmanager
def _instead_of(path: Path) -> Iterator[BinaryIO]:
    """What is written takes the file's name, when it is whole."""
    beside = path.with_name(path.name + ".lines")
    try:
        with beside.open("xb") as stream:
            os.fchmod(stream.fileno(), path.stat().st_mode & 0o777)
            yield stream
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
