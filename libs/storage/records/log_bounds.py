"""Where a log begins and ends, whether or not rows of it were removed.

    log bounds 0x53   | first sequence u64 | last sequence u64 | last message ID u64 |

Little-endian. There is no entry before the first sequence; the log ends at the last one or later,
whether or not that entry was removed. Written with removals; without the record: 1, 0 and 0.
"""

from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_BOUNDS = Fixed(first_sequence="Q", last_sequence="Q", last_message_id="Q")


class LogBoundsRecord(NamedTuple):
    """The earliest place where a log begins, and the earliest where it ends."""

    first_sequence: int = 1
    last_sequence: int = 0
    last_message_id: int = 0


def encode_log_bounds(bounds: LogBoundsRecord) -> bytes:
    return _BOUNDS.pack(*bounds)


def decode_log_bounds(data: bytes) -> LogBoundsRecord:
    return LogBoundsRecord(*Reader("log bounds", data).last("bounds", _BOUNDS))
