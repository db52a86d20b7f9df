r"""What an append is about to write, so that one that is killed half-way is found out.

A write of several pages that is killed leaves some of them: the last message is cut short, and
looks like a whole one. So the list of appends ends with this line while the file is written to::

    ~{"first": 120, "end": 4711, "head": "2d726573697a65"}

The writer has the file's lock meanwhile. Whoever has it, and finds the line, knows that the writer
is gone, and takes out the message that it has not finished. Nobody was told that it is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from slatemq.textqueue.pages import NEWLINE, last_beginning

BEGINS = b"~"

HEAD_BYTES = 64
"""Of what is written, to tell it from what somebody else has put there since."""

LINE_BYTES_MAX = 512


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
        os.pwrite(log, BEGINS + json.dumps(intent).encode() + NEWLINE, place)
        yield
    finally:
        os.ftruncate(log, place)


def is_left(log: int) -> bool:
    """Whether a line is there: a writer is at work, or was killed."""
    return _find(log) is not None


def mend(descriptor: int, log: int) -> None:
    """Take out what a killed writer has not finished; both files are locked. Raises OSError."""
    found = _find(log)
    if found is None:
        return
    place, intent = found
    size = os.fstat(descriptor).st_size
    if intent is not None and intent.first < size < intent.end:
        written = os.pread(descriptor, size - intent.first, intent.first)
        if written[:HEAD_BYTES] == intent.head[: len(written)]:
            # The entries before the last are whole. By this name, since the file may be open for
            # reading alone.
            end = intent.first + (last_beginning(written) or 0)
            os.truncate(f"/proc/self/fd/{descriptor}", end)
    os.ftruncate(log, place)


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
