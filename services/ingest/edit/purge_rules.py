"""When a message may be removed permanently: its age, and whether its event is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from libs.storage.layout.ids import MAX_MESSAGE_ID

__all__ = ["ALL_ANNOUNCED", "Reason", "Rules", "Unannounced"]


class Reason(Enum):
    EXPIRED = "expired"
    UNREFERENCED = "unreferenced"


@dataclass(frozen=True)
class Rules:
    """The ages from which messages may be removed; a replay window of 0 never ends."""

    grace_ms: int
    replay_window_ms: int

    def holds(self, reason: Reason, now_ms: int) -> Callable[[int, int], bool]:
        """A predicate over receipt (ms) and retention (s): whether the reason holds now."""
        if reason is Reason.EXPIRED:
            limit_ms = now_ms - self.grace_ms
            return lambda received_ms, kept_s: 0 < kept_s * 1000 <= limit_ms - received_ms
        oldest_ms = now_ms - self.grace_ms - self.replay_window_ms
        if not self.replay_window_ms:
            return lambda received_ms, kept_s: False
        # A retention of 0 keeps a message for ever, whether a queue needs it or not.
        return lambda received_ms, kept_s: kept_s > 0 and received_ms <= oldest_ms


class Unannounced(NamedTuple):
    """Messages whose events are not published yet: those behind `after_id`.

    They stay, unless they were received at `since_ms` or before.
    """

    after_id: int
    since_ms: int


ALL_ANNOUNCED: Final = Unannounced(MAX_MESSAGE_ID, 0)
"""Every event is published."""
