"""The progress of a queue's replay of the logs from before its creation.

    replay 0x4D | Array<(ingest shard u16 | start sequence u64 | cursor u64 | end sequence u64 |
                         since i64 | done count u64 | left count i64)>

Little-endian. Ranges of logs in ascending order, which do not overlap; start <= cursor <= end, and
the range is replayed up to the cursor. A range that ends with 2^63 - 1 has no end yet: the queue is
in quarantine, and live routing leaves everything after the start to a later replay. `since` is -1,
or the time (ms) whose place in the log is still to be looked up, as its ingest was down: then start
and cursor are 0. The counts are of messages: those judged so far, and those left up to the end, -1
while that is unknown.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_RANGE = Fixed(ingest_shard="H", start="Q", cursor="Q", end="Q", since_ms="q", done="Q", left="q")

FOUND = -1
"""`since_ms` of a range whose start is known."""

UNCOUNTED: Final = -1
"""`left_count` of a range whose messages are not counted yet."""

OPEN_END: Final = 2**63 - 1


class ReplayRange(NamedTuple):
    """A range of a log, in sequences: from `start`, done up to `cursor`, complete at `end`.

    With a `since_ms` the start is still to be looked up: the first message that was received then
    or later. `done_count` messages were judged, `left_count` are left.
    """

    ingest_shard: int
    start: int
    cursor: int
    end: int
    since_ms: int = FOUND
    done_count: int = 0
    left_count: int = UNCOUNTED

    @property
    def is_found(self) -> bool:
        """Whether the start is known."""
        return self.since_ms == FOUND

    @property
    def message_count(self) -> int | None:
        """How many messages it has, including those removed since; None: not counted yet."""
        if self.is_found and self.cursor == self.end:
            return self.done_count
        return None if self.left_count == UNCOUNTED else self.done_count + self.left_count


def encode_replay(ranges: Sequence[ReplayRange]) -> bytes:
    for one in ranges:
        if not one.start <= one.cursor <= one.end or (not one.is_found and one.cursor):
            raise ValueError(
                f"ranges: log {one.ingest_shard}: cursor {one.cursor} does not fit "
                f"{one.start}..{one.end}, since {one.since_ms} ms"
            )
    return _RANGE.pack_array("ranges", ranges)


def decode_replay(data: bytes) -> list[ReplayRange]:
    reader = Reader("replay", data)
    ranges = [ReplayRange(*row) for row in reader.array("ranges", _RANGE)]
    reader.finish()
    for ingest_shard, start, cursor, end, since_ms, _, left_count in ranges:
        if left_count < UNCOUNTED:
            raise reader.corrupt(f"log {ingest_shard}: {left_count} messages left")
        if since_ms < FOUND or (since_ms != FOUND and cursor):
            raise reader.corrupt(f"log {ingest_shard}: {cursor} done, from {since_ms} ms on")
        if not start <= cursor <= end:
            raise reader.corrupt(f"log {ingest_shard}: {cursor} is not within {start}..{end}")
    return ranges
