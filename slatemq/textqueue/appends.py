r"""The list of recent appends, which shows when an editor has saved an older copy of the file.

`FILE.appended` has a line for each append of this library, the newest last, and is kept short::

    [120, "9f86d081884c7d65", 1, 1800000000000, "resize photo 7", false]

An older copy lacks everything that was appended after the editor read it, and nothing before that.
So it is enough to look for the newest append: at its offset, at the end of the file, and then
everywhere; if it is nowhere, go back in the list until an append is found: those after it are gone.
A person may have removed them on purpose, which cannot be seen here: they are reported once.

An append may find that a save has just removed others, or that a save under way leaves nothing to
read. They cannot be reported before it is listed itself, and its presence does not prove theirs. So
it is listed as doubted (`true`): the next look goes further back.

A write of several pages that is killed leaves some of them: the last message is truncated, and
looks complete. So the list ends with this line, the intent of an append, while the file is written
to::

    ~{"first": 120, "end": 4711, "head": "2d726573697a65"}          \n     641 bytes

The writer holds the file's lock meanwhile. A process that takes the lock and finds the line knows
that the writer is gone, and removes the unfinished message, whose append never returned.
"""

from __future__ import annotations

import errno
import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from slatemq.textqueue.editing import entry_at, found_at, reader
from slatemq.textqueue.entries import Entry
from slatemq.textqueue.errors import AppendLost, FormatError, NoSuchEntry
from slatemq.textqueue.locks import READ_ONLY, How, is_named, opened, opened_beside, put
from slatemq.textqueue.pages import NEWLINE, last_beginning
from slatemq.textqueue.parsing import scan

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
    return start + place, _intent(line[1:])


def _intent(content: bytes) -> Intent | None:
    """None for a line that is truncated, or was edited."""
    try:
        fields = json.loads(content)
        return Intent(int(fields["first"]), int(fields["end"]), bytes.fromhex(fields["head"]))
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None


LOG_BYTES_MAX = 1 << 16
"""Above this size the older half is dropped."""

START_LENGTH = 40
"""Characters of a text in the list, for people, and to exclude most other texts quickly."""

END_BYTES = 4096
"""Of the end of the file, where its last entry begins unless it is long."""

SETTLED_SECONDS = 0.005
"""An editor takes less between emptying a file and writing it."""

SETTLING_ROUNDS_MAX = 40


class Append(NamedTuple):
    """One append, by its last message.

    Attributes:
        offset: Of the message.
        digest: Of its text.
        messages: The number of messages of the append.
        at_ms: Unix time of the append.
        start: The beginning of its text.
        is_doubted: Whether older ones may be gone though it is there.
    """

    offset: int
    digest: str
    messages: int
    at_ms: int
    start: str
    is_doubted: bool = False


def appended(path: str) -> str:
    """The path of the list, which the first append creates."""
    return path + ".appended"


@contextmanager
def listing(path: str, descriptor: int) -> Iterator[int]:
    """The list of an open file, locked, and created if missing. Raises OSError."""
    with opened_beside(appended(path), os.fstat(descriptor)) as log:
        yield log


def remember(log: int, entry: Entry, count: int, now_ms: int, *, is_doubted: bool) -> None:
    """Add an append to the list, or change nothing; the caller has locked the file. Raises OSError.

    `is_doubted`: listed appends before it may be gone, see `may_lack_others`.
    """
    made = _append_of(entry, count, now_ms)._replace(is_doubted=is_doubted)
    size = os.fstat(log).st_size
    if size > LOG_BYTES_MAX:
        kept = _lines(os.pread(log, size, 0))
        rewrite(log, [*kept[len(kept) // 2 :], made])
    else:
        put(log, _line(made), size)


def may_lack_others(path: str, descriptor: int, log: int) -> bool:
    """Whether a save in place may have removed listed appends just before ours.

    The caller has locked the file. Raises OSError.
    """
    try:
        _, found = _looked_for(path, descriptor, log)
    except FormatError:
        return True  # A save is under way, and what it leaves is not known yet.
    return None in found


def copied(path: str, descriptor: int, entry: Entry) -> Entry | None:
    """The entry that was just appended to the open file, in the file that has its name now.

    None where it is not there: an editor had read the file before. The list is locked, so no other
    process appends an entry with the same text meanwhile. Raises OSError.
    """
    made = [_append_of(entry, 1, 0)]
    try:
        with opened(path, os.O_RDONLY, How.NONE) as now:
            there, offsets = _found(now, made)
            before, _ = _found(descriptor, made)
            [one] = made
            return entry_at(now, offsets[one.digest]) if there >= before else None
    except (FileNotFoundError, FormatError, NoSuchEntry):
        return None  # an editor is saving


def appends_after(log: int, new: int, last: Entry | None, now_ms: int) -> list[Append]:
    """The new list for a file that we have rewritten: its listed appends, and its last entry.

    Raises FormatError, OSError.
    """
    made = _lines(os.pread(log, os.fstat(log).st_size, 0))
    found, places = _found(new, made)
    kept = list[Append]()
    for one in reversed(made):
        # Of equal texts, the newest are taken to be there.
        if found[one.digest] > 0:
            found[one.digest] -= 1
            kept.append(one._replace(offset=places[one.digest], is_doubted=False))
    kept.reverse()
    if last is not None and (not kept or kept[-1].offset != last.offset):
        kept.append(_append_of(last, 1, now_ms))
    return kept


def look(path: str, name: str, descriptor: int) -> bool:
    """Whether all listed appends are there; warns of AppendLost if not.

    Warns once, or every time where the list cannot be written. The caller has locked the file, at
    least shared. Raises OSError.
    """
    with _list(path) as (log, is_ours):
        if log is None:
            return True
        keeps = is_ours and repair(path, descriptor, log)
        try:
            made, found = _looked_for(path, descriptor, log)
        except FormatError:
            return True  # whatever reads the file reports the error, and the next call looks again
        if keeps and made != found:
            rewrite(log, [now for now in found if now is not None])
    gone = [one for one, now in zip(made, found, strict=True) if now is None]
    if gone:
        where = tuple((one.offset, one.start) for one in gone)
        count = sum(one.messages for one in gone)
        warnings.warn(AppendLost(name, count, where), stacklevel=2)
    return not gone


def finished(path: str, descriptor: int) -> int:
    """The end of the last complete entry; the caller has locked the file. Raises OSError.

    Removes what a killed append has left, if permissions allow.
    """
    torn = under_way(path, descriptor)
    if torn is not None:
        with _list(path) as (log, is_ours):
            if log is None or not is_ours or not repair(path, descriptor, log):
                return torn
    return os.fstat(descriptor).st_size


def under_way(path: str, descriptor: int) -> int | None:
    """The offset of an entry that is being written, or was when its writer was killed."""
    try:
        with opened(appended(path), os.O_RDONLY, How.NONE) as log:
            return unfinished(descriptor, log)
    except (FileNotFoundError, PermissionError):
        return None


@contextmanager
def _list(path: str) -> Iterator[tuple[int | None, bool]]:
    """The list, if it exists, locked, and whether it is writable. Raises OSError."""
    with ExitStack() as stack:
        log, is_ours = None, True
        try:
            log = stack.enter_context(opened(appended(path), os.O_RDWR, How.EXCLUSIVE))
        except FileNotFoundError:
            pass  # nothing was appended yet
        except OSError as error:
            if error.errno not in READ_ONLY:
                raise
            is_ours = False
            log = stack.enter_context(opened(appended(path), os.O_RDONLY, How.EXCLUSIVE))
        yield log, is_ours


def _looked_for(
    path: str, descriptor: int, log: int
) -> tuple[list[Append], Sequence[Append | None]]:
    """The listed appends, and each as it is in the file now, None if gone.

    Both are empty where nothing has changed, or is known. Raises FormatError.
    """
    size = os.fstat(log).st_size
    tail = os.pread(log, LINE_BYTES_MAX, max(0, size - LINE_BYTES_MAX))
    newest = next(_newest_first(tail), None)
    if newest is None or (not newest.is_doubted and _is_at(descriptor, newest)):
        return [], []
    made = _lines(os.pread(log, size, 0))
    moved = None if newest.is_doubted else _at_the_end(descriptor, made)
    if moved is not None:
        # An editor has changed entries above it.
        return made, [*made[:-1], moved]
    found = _present(descriptor, made)
    if None in found:
        _settle(descriptor)
        found = _present(descriptor, made)
    if not is_named(descriptor, path):
        # Replaced just now: the new file may have all of them.
        return [], []
    return made, found


def _at_the_end(descriptor: int, made: list[Append]) -> Append | None:
    """The newest append as it is now, if it is the last entry and the only one of its text."""
    newest = made[-1]
    if sum(one.digest == newest.digest for one in made) > 1:
        return None
    start = max(0, os.fstat(descriptor).st_size - END_BYTES)
    beginning = last_beginning(os.pread(descriptor, END_BYTES, start))
    if beginning is None:
        return None
    moved = newest._replace(offset=start + beginning)
    return moved if _is_at(descriptor, moved) else None


def _present(descriptor: int, made: list[Append]) -> list[Append | None]:
    """Each append as it is in the file now, None if gone.

    Where one is there, so are older ones, unless it is doubted.
    """
    found, offsets = _found(descriptor, made)
    # Of equal texts, the older ones come first.
    expected = Counter(one.digest for one in made)
    present = list[Append | None]()
    is_any_there = False
    for one in reversed(made):
        if is_any_there:
            is_any_there = not one.is_doubted
            present.append(one._replace(is_doubted=False))
        elif found[one.digest] >= expected[one.digest]:
            is_any_there = not one.is_doubted
            present.append(one._replace(offset=offsets[one.digest], is_doubted=False))
        else:
            present.append(None)
        expected[one.digest] -= 1
    present.reverse()
    return present


def _found(descriptor: int, made: list[Append]) -> tuple[Counter[str], dict[str, int]]:
    """For each digest, the number of entries with that text, and the offset of the last."""
    starts = {one.start for one in made}
    found: Counter[str] = Counter()
    offsets: dict[str, int] = {}
    if not made:
        return found, offsets  # without reading all of the file
    for entry in scan(reader(descriptor)):
        if entry.text[:START_LENGTH] in starts:
            found[entry.digest] += 1
            offsets[entry.digest] = entry.offset
    return found, offsets


def _settle(descriptor: int) -> None:
    before = None
    for _ in range(SETTLING_ROUNDS_MAX):
        status = os.fstat(descriptor)
        now = (status.st_size, status.st_mtime_ns)
        if now == before:
            return
        before = now
        time.sleep(SETTLED_SECONDS)


def _is_at(descriptor: int, made: Append) -> bool:
    entry = found_at(descriptor, made.offset)
    return entry is not None and entry.digest == made.digest


def _append_of(entry: Entry, count: int, now_ms: int) -> Append:
    return Append(entry.offset, entry.digest, count, now_ms, entry.text[:START_LENGTH])


def rewrite(log: int, made: list[Append]) -> None:
    """Replace the list, or change nothing. Raises OSError."""
    content = b"".join(map(_line, made))
    put(log, content, 0)
    os.ftruncate(log, len(content))


def _line(made: Append) -> bytes:
    return json.dumps(made).encode() + NEWLINE


def _lines(content: bytes) -> list[Append]:
    return list(_newest_first(content))[::-1]


def _newest_first(content: bytes) -> Iterator[Append]:
    """The valid lines: the first may be cut off, and a power failure may damage others."""
    for line in reversed(content.splitlines()):
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            continue
        kinds = [type(one) for one in fields] if isinstance(fields, list) else []
        if kinds == [int, str, int, int, str, bool]:
            yield Append(*fields)
