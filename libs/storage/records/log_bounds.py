"""The value of a log bounds record: what the log's own rows no longer tell once some are removed.

    log bounds 0x53   | first sequence u64 | last sequence u64 | last message ID u64 |

Little-endian. No entry stands before the first sequence; the log ends at the last one or behind it,
whether or not an entry stands there still. Written with removals; without the record: 1, 0 and 0.
"""

from typing import NamedTuple

from libs.storage.layout.primitives import Fixed, Reader

_BOUNDS = Fixed(first_sequence="Q", last_sequence="Q", last_message_id="Q")


class LogBoundsRecord(NamedTuple):
    """Where a log begins at the earliest, and where it ends at the earliest."""

    first_sequence: int = 1
    last_sequence: int = 0
    last_message_id: int = 0


def encode_log_bounds(bounds: LogBoundsRecord) -> bytes:
    return _BOUNDS.pack(*bounds)


def decode_log_bounds(data: bytes) -> LogBoundsRecord:
    return LogBoundsRecord(*Reader("log bounds", data).last("bounds", _BOUNDS))
