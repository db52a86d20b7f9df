r"""The intent of an append, written before it, to detect one that was killed half-way.

A write of several pages that is killed leaves some of them: the last message is truncated, and
looks complete. So the list of appends ends with this line while the file is written to::

    ~{"first": 120, "end": 4711, "head": "2d726573697a65"}          \n     641 bytes

The writer holds the file's lock meanwhile. A process that takes the lock and finds the line knows
that the writer is gone, and removes the unfinished message, whose append never returned.
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
"""The beginning of the content, to recognize it in the file."""

LINE_BYTES_MAX = 1024
"""Of any line in the list."""

ROOM_BYTES = 640
"""Of this line, padded with spaces: the line of the append that replaces it is never longer, so the
disk has room for it."""


class Intent(NamedTuple):
    """An intended write.

    Attributes:
        first: Its offset in the file.
        end: The offset of its end.
        head: Its first bytes.
    """

    first: int
    end: int
    head: bytes


@contextmanager
def intended(log: int, first: int, content: bytes) -> Iterator[None]:
    """Keep the line in the list during the block. Raises OSError, with nothing written."""
    place = os.fstat(log).st_size
    intent = {"first": first, "end": first + len(content), "head": content[:HEAD_BYTES].hex()}
    try:
        put(log, (BEGINS + json.dumps(intent).encode()).ljust(ROOM_BYTES) + NEWLINE, place)
        yield
    finally:
        os.ftruncate(log, place)


def unfinished(descriptor: int, log: int) -> int | None:
    """The offset of an entry that is being written, or was when its writer was killed."""
    found = _find(log)
    if found is None or found[1] is None:
        return None
    intent, size = found[1], os.fstat(descriptor).st_size
    if not intent.first < size < intent.end:
        return None
    written = os.pread(descriptor, size - intent.first, intent.first)
    if written[:HEAD_BYTES] != intent.head[: len(written)]:
        return None
    # The entries before the last are complete.
    return intent.first + (last_beginning(written) or 0)


def repair(path: str, descriptor: int, log: int) -> bool:
    """Remove what a killed writer has not finished; False if not permitted. Raises OSError.

    The caller has locked both files; the list is open for writing.
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
    # By its path, because it may be open only for reading.
    try:
        with opened(path, os.O_RDWR, How.NONE) as writable:
            if not os.path.samestat(os.fstat(writable), os.fstat(descriptor)):
                return False  # replaced just now: opening the new file looks again
            os.ftruncate(writable, end)
    except OSError as error:
        if error.errno not in (errno.ENOENT, *READ_ONLY):
            raise
        return False
    return True


def _find(log: int) -> tuple[int, Intent | None] | None:
    """The offset of the line and its intent, None if truncated; None without a line."""
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
