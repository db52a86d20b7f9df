"""The value of a queue's replay: how far the logs from before its creation are brought in.

    replay 0x4D | Array<(ingest shard u16 | start sequence u64 | cursor u64 | end sequence u64)> |

Little-endian. One element for each log, in ascending order of its ingest shard; start <= cursor <=
end, and all of the log up to the cursor is brought in.

Encoding raises ValueError naming the field that does not fit, decoding CorruptRecord.
"""

from collections.abc import Sequence
from typing import NamedTuple

from libs.storage.primitives import Fixed, Reader

_RANGE = Fixed(ingest_shard="H", start="Q", cursor="Q", end="Q")


class ReplayRange(NamedTuple):
    """The replay of one log, in sequences: from `start`, done up to `cursor`, complete at `end`."""

    ingest_shard: int
    start: int
    cursor: int
    end: int


def encode_replay(ranges: Sequence[ReplayRange]) -> bytes:
    """Replay value."""
    return _RANGE.pack_array("ranges", ranges)


def decode_replay(data: bytes) -> list[ReplayRange]:
    """Replay value."""
    reader = Reader("replay", data)
    ranges = [ReplayRange(*row) for row in reader.array("ranges", _RANGE)]
    reader.finish()
    for ingest_shard, start, cursor, end in ranges:
        if not start <= cursor <= end:
            raise reader.corrupt(f"log {ingest_shard}: {cursor} is not within {start}..{end}")
    return ranges
