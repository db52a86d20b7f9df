"""Bounds of the server on what is given back: one item beyond them refuses a whole call."""

from __future__ import annotations

from slatemq._checks import check_text
from slatemq.errors import InvalidArgument
from slatemq.models import Duration, milliseconds

REASON_BYTES_MAX = 1024
DELAY_MS_MAX = 43_200_000


def bounded_delay_ms(delay: Duration) -> int:
    """A delay of a message given back, in ms. Raises InvalidArgument beyond 12 h."""
    delay_ms = milliseconds(delay, "delay")
    if not 0 <= delay_ms <= DELAY_MS_MAX:
        raise InvalidArgument(
            "delay", f"must be 0 to 12 hours, not {delay_ms / 1000:,g} s", reason="OUT_OF_RANGE"
        )
    return delay_ms


def cut_reason(reason: str) -> str:
    """A reason, cut where it is too long; raises InvalidArgument where it is not text."""
    check_text("reason", reason)
    return reason.encode("utf-8", "replace")[:REASON_BYTES_MAX].decode("utf-8", "ignore")
