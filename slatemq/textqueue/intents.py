r"""What an append is about to write, so that one that is killed half-way is found out.

A write of several pages that is killed leaves some of them: the last message is cut short, and
looks like a whole one. So the list of appends ends with this line while the file is written to::

    ~{"first": 120, "end": 4711, "head": "2d726573697a65"}          \n     641 bytes

The writer has the file's lock meanwhile. Whoever has it, and finds the line, knows that the writer
is gone, and takes out the message that it has not finished. Nobody was told that it is there.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from slatemq.textqueue.locks import READ_ONLY, How, opened, put
from slatemq.textqueue.pages import NEWLINE, last_beginning

BEGINS = b"~"

HEAD_BYTES = 64
"""Of what is written, to tell it from what somebody else has put there since."""

LINE_BYTES_MAX = 1024
"""Of any line in the list."""

ROOM_BYTES = 640
"""Of this line, its end filled with spaces: no line that takes its place when the append is done is
longer, so that there is room for it on the disk."""


class Intent(NamedTuple):
    """What was to be written.

    Attributes:
        first: Where in the file.
        end: Where it was to end.
        head: How it begins.
    """

    first: int
    end: int
    head: bytes


@contextmanager
def intended(log: int, first: int, content: bytes) -> Iterator[None]:
    """The line is there while this is entered. Raises OSError, with nothing written."""
    place = os.fstat(log).st_size
    intent = {"first": first, "end": first + len(content), "head": content[:HEAD_BYTES].hex()}
    try:
        put(log, (BEGINS + json.dumps(intent).encode()).ljust(ROOM_BYTES) + NEWLINE, place)
        yield
    finally:
        os.ftruncate(log, place)


def unfinished(descriptor: int, log: int) -> int | None:
    """Where the entry begins that is being written, or was when its writer was killed."""
    found = _find(log)
    if found is None or found[1] is None:
        return None
    intent, size = found[1], os.fstat(descriptor).st_size
    if not intent.first < size < intent.end:
        return None
    written = os.pread(descriptor, size - intent.first, intent.first)
    if written[:HEAD_BYTES] != intent.head[: len(written)]:
        return None
    # The entries before the last are whole.
    return intent.first + (last_beginning(written) or 0)


def repair(path: str, descriptor: int, log: int) -> bool:
    """Take out what a killed writer has not finished; False if we may not. Raises OSError.

    Both files are locked for us; the list is open for writing.
    """
    found = _find(log)
    if found is None:
        return True
    end = unfinished(descriptor, log)
    if end is not None and not _cut(path, descriptor, end):
        return False
    os.ftruncate(log, found[0])
    return True


def _cut(path: str, descriptor: int, end: int) -> bool:
    # By its name, since it may be open for reading alone.
    try:
        with opened(path, os.O_RDWR, How.NONE) as writable:
            if not os.path.samestat(os.fstat(writable), os.fstat(descriptor)):
                return False  # replaced just now: whoever opens what is there now looks again
            os.ftruncate(writable, end)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *READ_ONLY):
            raise
        return False
    return True


def _find(log: int) -> tuple[int, Intent | None] | None:
    """Where the line is, and what it says; None where it was not written to its end."""
    size = os.fstat(log).st_size
    start = max(0, size - LINE_BYTES_MAX)
    tail = os.pread(log, LINE_BYTES_MAX, start)
    place = tail.rfind(NEWLINE, 0, -1) + 1
    line = tail[place:]
    if not line.startswith(BEGINS):
        return None
    try:
        fields = json.loads(line[1:])
        intent = Intent(int(fields["first"]), int(fields["end"]), bytes.fromhex(fields["head"]))
    except (ValueError, TypeError, KeyError):
        return start + place, None
    return start + place, intent
