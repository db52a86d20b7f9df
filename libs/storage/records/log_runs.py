"""Runs: messages of a log entry that follow one another and share metadata.

Most batches are published with the same headers, times and retention. Their records then differ
only in the IDs at their beginning, which are consecutive, so they are written and recognized as a
whole, at a tenth of the cost of looking at each.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

Fields = tuple[int, int, int, int, int]
"""The numbers of a record: ID, created at, received at, visible at, retention."""

LogRun = tuple[Fields, dict[str, str], int, Sequence[int], str]
"""The numbers of the first message, headers, delay (-1: none), the payload bytes of each message,
and the direct queue. The others have the next IDs; all else is the same."""

_ID = struct.Struct("<Q")
_ID_END = 2**64
# After this many equal messages the end of their run is searched for; where they differ, the next
# look is after four times as many.
_ALIKE_MIN = 32


def stretches(columns: Sequence[Sequence[object]]) -> Iterator[tuple[int, int, bool]]:
    """Starts and ends of stretches, and whether every column is constant in them."""
    start, count = 0, len(columns[0])
    while start < count:
        end = start + _ALIKE_MIN
        are_alike = end <= count and _are_one(columns, start, start, end)
        if are_alike:
            end = _reach(partial(_are_one, columns, start), end, count, 4 * _ALIKE_MIN)
        else:
            end = min(start + 4 * _ALIKE_MIN, count)
        yield start, end, are_alike
        start = end


def encode_run(ids: range, rest: bytes) -> bytes:
    """Records with these IDs and the same bytes after each; struct.error if an ID is not a u64."""
    records = bytearray((_ID.pack(ids[0]) + rest) * len(ids))
    packed = struct.pack(f"<{len(ids)}Q", *ids)
    for at in range(((ids[0] ^ ids[-1]).bit_length() + 7) // 8):
        records[at :: _ID.size + len(rest)] = packed[at :: _ID.size]
    return bytes(records)


def run_length(data: bytes, at: int, end: int, most: int) -> int:
    """The length, `most` at most, of the run that begins with the record from `at` to `end`."""
    size, rest = end - at, data[at + _ID.size : end]
    if not data.startswith(rest, end + _ID.size):
        return 1
    (first_id,) = _ID.unpack_from(data, at)

    def is_run(start: int, stop: int) -> bool:
        # Where a run ends sooner, usually its last record differs, which is cheap to check.
        return data.startswith(rest, at + stop * size - len(rest)) and data.startswith(
            encode_run(range(first_id + start, first_id + stop), rest), at + start * size
        )

    return _reach(is_run, 1, min(most, _ID_END - first_id), 1)


def parted(
    records: Iterable[tuple[Fields, dict[str, str]]],
    longer: Mapping[int, int],
    delays: Sequence[int],
    sizes: Sequence[int],
    queues: Sequence[str],
) -> Iterator[LogRun]:
    """Runs, by their first records; `longer` has the lengths of those of several messages.

    The messages of a run with several delays or queues are returned one by one.
    """
    start = 0
    for place, (fields, headers) in enumerate(records):
        end = start + longer.get(place, 1)
        if end - start == 1 or _are_one((delays, queues), start, start, end):
            yield fields, headers, delays[start], sizes[start:end], queues[start]
        else:
            run: LogRun = (fields, headers, 0, sizes[start:end], "")
            for at, (own, _, _, size, _) in enumerate(one_by_one(run), start):
                yield own, headers, delays[at], size, queues[at]
        start = end


def one_by_one(run: LogRun) -> Iterator[LogRun]:
    """The messages of a run, each as a run of one."""
    (first_id, created, received, visible, retention), headers, delay, sizes, queue = run
    for message_id, size in enumerate(sizes, first_id):
        yield (message_id, created, received, visible, retention), headers, delay, (size,), queue


def _are_one(columns: Sequence[Sequence[object]], like: int, start: int, end: int) -> bool:
    """Whether every column of a stretch has the element at `like` throughout."""
    for column in columns:
        one = column[like]
        if column[end - 1] != one or column[start:end].count(one) != end - start:
            return False
    return True


def _reach(holds: Callable[[int, int], bool], start: int, end: int, step: int) -> int:
    """The end up to which `holds`, searched in steps that grow, and shrink after one too long."""
    grows = True
    while step := min(step, end - start):
        if holds(start, start + step):
            start += step
        else:
            grows = False
        step = step * 4 if grows else step // 2
    return start
