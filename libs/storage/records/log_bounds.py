"""Where a log begins and ends, whether or not rows of it were removed, and where its IDs jump.

    log bounds 0x53   | first sequence u64 | last sequence u64 | last message ID u64 |
    log gaps 0x55     | Array<(after u64, next u64)> |

Little-endian. There is no entry before the first sequence; the log ends at the last one or later,
whether or not that entry was removed. Written with removals; without the record: 1, 0 and 0.

Gaps are in ascending order. No message has an ID between `after`, the last one before a restart of
the ingest, and `next`, the first one after it. Written by the first commit with messages after a
restart; without the record the log has no gaps.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_BOUNDS = Fixed(first_sequence="Q", last_sequence="Q", last_message_id="Q")
_GAP = Fixed(after="Q", next="Q")

GAPS_MAX: Final = 1_000
"""The newest gaps are kept: 16 KB, written once after a restart. IDs in older gaps count as
messages, if a log is kept over that many restarts."""


class LogBoundsRecord(NamedTuple):
    """The earliest place where a log begins, and the earliest where it ends."""

    first_sequence: int = 1
    last_sequence: int = 0
    last_message_id: int = 0


def encode_log_bounds(bounds: LogBoundsRecord) -> bytes:
    return _BOUNDS.pack(*bounds)


def decode_log_bounds(data: bytes) -> LogBoundsRecord:
    return LogBoundsRecord(*Reader("log bounds", data).last("bounds", _BOUNDS))


class LogGap(NamedTuple):
    """No message has an ID between these two."""

    after: int
    next: int


def encode_log_gaps(gaps: Sequence[LogGap]) -> bytes:
    return _GAP.pack_array("gaps", gaps)


def decode_log_gaps(data: bytes) -> list[LogGap]:
    reader = Reader("log gaps", data)
    gaps = [LogGap(*row) for row in reader.array("gaps", _GAP)]
    reader.finish()
    for gap in gaps:
        if gap.next <= gap.after:
            raise reader.corrupt(f"the gap after {gap.after} ends at {gap.next}")
    for gap, later in pairwise(gaps):
        if later.after < gap.next:
            raise reader.corrupt(f"the gap after {later.after} begins before {gap.next}")
    return gaps


class LogIds:
    """The IDs of a log: counts messages between two places in it."""

    def __init__(self, first_id: int, gaps: Sequence[LogGap]) -> None:
        """There is no message before `first_id`; the gaps ascend."""
        self._before = first_id - 1
        self._gaps = gaps
        self._afters = [gap.after for gap in gaps]
        self._skipped = list(accumulate((gap.next - gap.after - 1 for gap in gaps), initial=0))

    def count(self, after: int, last: int) -> int:
        """How many messages have IDs above `after`, up to `last`.

        Includes removed ones, except those before the first that is left.
        """
        after = max(after, self._before)
        return max(self._number(last) - self._number(after), 0)

    def _number(self, place: int) -> int:
        at = bisect_left(self._afters, place)
        if not at:
            return place
        gap = self._gaps[at - 1]
        return place - self._skipped[at - 1] - (min(place, gap.next - 1) - gap.after)
