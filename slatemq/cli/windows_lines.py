r"""Line ends that an editor has made those of Windows (CRLF).

In a queue file a carriage return is text like any other, so each line of such a file has one too
much: `\id=17` has become `\id=17\r`. We never write one at the end of these variables, so it shows.
"""

from __future__ import annotations

import os
from pathlib import Path

from slatemq.cli.failures import BadInput
from slatemq.textqueue import Entry, State, TextQueue

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
                f"{file}:{entry.line}: the variable {name} ends with a carriage return: the file "
                "was saved with Windows line ends (CRLF). Save it with those of Unix: "
                "`:set ff=unix` in vi, LF at the bottom of VS Code's window, or `dos2unix`. (A "
                "header that is to end with one is written as header-json.)"
            )


def expect_none_in(file: str) -> None:
    """The same for each entry of a file. Raises FormatError, OSError, too."""
    for entry in TextQueue(file).entries(*State):
        expect_none(entry, file)


def has_any(path: Path) -> bool:
    """Whether a line of the file ends so."""
    with path.open("rb") as lines:
        return any(line.endswith(CRLF) for line in lines)


def taken_back(path: Path) -> bool:
    """Make all line ends those of Unix again, if all are those of Windows; whether they were.

    That loses nothing of a file which had none of them before it was edited.
    """
    with path.open("rb") as lines:
        # The last line may have no end.
        begins_so = next(lines, b"").endswith(CRLF)
        if not begins_so or any(not line.endswith(CRLF) for line in lines if line.endswith(b"\n")):
            return False
    beside = path.with_name(path.name + ".lines")
    try:
        with path.open("rb") as lines, beside.open("xb") as stream:
            os.fchmod(stream.fileno(), path.stat().st_mode & 0o777)
            for line in lines:
                stream.write(line.removesuffix(CRLF) + b"\n" if line.endswith(CRLF) else line)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return True
