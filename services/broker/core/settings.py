"""The settings of a queue, and their stored form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from libs.storage.records.configs import QueueConfigRecord
from services.broker.core.backoff import Backoff

MAX_LEASE_MS = 43_200_000
"""12 h, the longest lease of any queue, as in other message queues."""

MAX_TOTAL_LEASE_MS = 604_800_000
"""7 days, the longest that any queue lets one claim hold a message, extensions included."""

DEFAULT_PRIORITY = 128
"""The priority of messages that have none: the middle, with room on both sides."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What a queue's owner may set, and when it was set. Retention 0 = forever."""

    filter: str
    priority: str = ""
    max_attempts: int = 5
    lease_ms: int = 30_000
    max_lease_ms: int = MAX_LEASE_MS
    done_retention_s: int = 86_400
    max_in_flight: int = 100_000
    default_delay_ms: int = 0
    backoff: Backoff | None = None
    fallback_priority: int = DEFAULT_PRIORITY
    max_total_lease_ms: int = MAX_LEASE_MS
    failed_retention_s: int = 0
    paused: bool = False
    quarantine: str = ""
    """Why routing leaves the queue out; empty if it does not."""
    quarantined_at_ms: int = 0
    created_at_ms: int = 0
    updated_at_ms: int = 0
    revision: int = 0
    others: tuple[tuple[str, str], ...] = ()
    """Stored settings that this version does not know, kept unchanged."""

    def changed(self, **settings: Any) -> QueueSettings:
        return replace(self, **settings)

    @property
    def routing(self) -> tuple[object, ...]:
        """What routers judge by: it applies to messages published after its change."""
        return (
            self.filter,
            self.priority,
            self.fallback_priority,
            self.default_delay_ms,
            self.quarantine,
        )

    def backoff_ms(self, attempts: int, token: int) -> int:
        return self.backoff.wait_ms(attempts, token) if self.backoff else 0

    def record(self) -> QueueConfigRecord:
        """The stored form, without settings at their default: most queues keep those."""
        settings = dict(self.others)
        for name in _STORED:
            value = getattr(self, name)
            # The lease is always stored: its default is most likely to be retuned.
            if value != _DEFAULTS[name] or name == "lease_ms":
                settings[name] = _text(value)
        return QueueConfigRecord(self.filter, self.max_attempts, self.done_retention_s, settings)

    @classmethod
    def from_record(cls, record: QueueConfigRecord) -> QueueSettings:
        known = {
            name: parse(record.settings[name])
            for name, parse in _STORED.items()
            if name in record.settings
        }
        others = tuple((key, value) for key, value in record.settings.items() if key not in _STORED)
        return cls(
            filter=record.filter,
            max_attempts=record.max_attempts,
            done_retention_s=record.done_retention_s,
            others=others,
            **known,
        )


_DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(QueueSettings)}

_STORED: dict[str, Callable[[str], Any]] = {
    "priority": str,
    "lease_ms": int,
    "max_lease_ms": int,
    "max_in_flight": int,
    "default_delay_ms": int,
    "backoff": Backoff.parse,
    "fallback_priority": int,
    "max_total_lease_ms": int,
    "failed_retention_s": int,
    "paused": lambda text: text == "1",
    "quarantine": str,
    "quarantined_at_ms": int,
    "created_at_ms": int,
    "updated_at_ms": int,
    "revision": int,
}
"""The settings that are stored as text, with their parsers."""


def _text(value: Any) -> str:
    if isinstance(value, Backoff):
        return value.text()
    return str(int(value) if isinstance(value, bool) else value)
