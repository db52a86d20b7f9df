"""The bound on delays that an instance sets, refused in the same words by all that take one."""

from __future__ import annotations

from slatemq.errors import InvalidArgument


def check_delay_ms(field: str, delay_ms: int, most_ms: int) -> int:
    """The delay. Raises InvalidArgument beyond the setting `max_message_delay_ms`."""
    if not 0 <= delay_ms <= most_ms:
        raise InvalidArgument(
            field,
            f"must be 0..{most_ms} (the setting max_message_delay_ms), not {delay_ms}",
            reason="OUT_OF_RANGE",
            metadata={"setting": "max_message_delay_ms", "most": str(most_ms)},
        )
    return delay_ms
