r"""What editors on Windows do to a file: Windows line ends (CRLF), a byte order mark.

In a queue file a carriage return is text like any other, so each line of such a file has an extra
one: `\id=17` becomes `\id=17\r`. We never write one at the end of these variables, which shows it.
A byte order mark makes the first line an entry of an unknown kind, which is skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slatemq.cli.failures import BadInput
from slatemq.cli.tq.entries import begins_with_mark, marked
from slatemq.textqueue import Entry, State, TextQueue
from slatemq.textqueue.controls import BYTE_ORDER_MARK

CRLF = b"\r\n"

_OURS = frozenset(
    {"id", "handle", "etag", "content", "encoding", "retention", "created_at", "settled"}
    | {"slatemq", "session", "header-json"}
)
"""Variables that an export writes and that an edit or import reads."""

_HEADER = "header."


class WindowsLines(BadInput):
    """The file has Windows line ends; the message says where and what to do."""


def expect_none(entry: Entry, file: str) -> None:
    """Raises WindowsLines where a variable of ours ends with a carriage return."""
    if b"\r" not in entry.raw:
        return
    for variable in entry.variables:
        name = variable.name or ""
        if variable.value.endswith("\r") and (name in _OURS or name.startswith(_HEADER)):
            raise WindowsLines(
                f"{file}:{entry.line_of(variable)}: the variable {name} ends with a carriage "
                "return: the file was saved with Windows line ends (CRLF). Save it with Unix line "
                "ends: `:set ff=unix` in vi, LF at the bottom of VS Code's window, or `dos2unix`. "
                "(Write a header that ends with a carriage return as header-json.)"
            )


def expect_none_in(file: str) -> None:
    """Raises BadInput for Windows line ends or a byte order mark, FormatError, OSError."""
    if begins_with_mark(file):
        raise BadInput(f"{file}:1: {marked(file)}")
    for entry in TextQueue(file).entries(*State):
        expect_none(entry, file)


def has_any(path: Path) -> bool:
    with path.open("rb") as lines:
        return any(line.endswith(CRLF) for line in lines)


def remove_mark(path: Path) -> bool:
    """Remove the byte order mark from the start of the file; return whether it had one."""
    if not begins_with_mark(path):
        return False
    with path.open("rb") as stream, _instead_of(path) as whole:
        stream.seek(len(BYTE_ORDER_MARK.encode()))
        shutil.copyfileobj(stream, whole)
    return True


def restore_unix_lines(path: Path) -> bool:
    """Convert CRLF to LF if every line ends in CRLF; return whether it did.

    That loses nothing of a file that had no CRLF before it was edited.
    """
    with path.open("rb") as lines:
        # The last line may have no line end.
        begins_so = next(lines, b"").endswith(CRLF)
        if not begins_so or any(not line.endswith(CRLF) for line in lines if line.endswith(b"\n")):
            return False
    with path.open("rb") as lines, _instead_of(path) as whole:
        for line in lines:
            whole.write(line.removesuffix(CRLF) + b"\n" if line.endswith(CRLF) else line)
    return True


@contextmanager
def _instead_of(path: Path) -> Iterator[BinaryIO]:
    """A file that replaces `path` once it is completely written."""
    beside = path.with_name(path.name + ".lines")
    try:
        with beside.open("xb") as stream:
            os.fchmod(stream.fileno(), path.stat().st_mode & 0o777)
            yield stream
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
