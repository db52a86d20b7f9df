"""The rule that spreads messages over partitions, as `libs.storage.layout.partitions` states it."""

from __future__ import annotations

from libs.storage.layout.partitions import partition_of_value


def partition_of(message_id: int, value: str | None, count: int) -> int:
    """The partition of a message; `value` is that of its ordering header, None without one."""
    if value is not None:
        return partition_of_value(value, count)
    return (message_id * 0x9E3779B97F4A7C15 % 2**64) * count >> 64
