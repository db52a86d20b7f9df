"""The settings of a queue, and their stored form."""

from __future__ import annotations

from dataclasses import dataclass, replace

from libs.storage.configs import QueueConfigRecord

MAX_LEASE_MS = 43_200_000
"""12 h, the longest lease of any queue: as long as the longest of the field."""

DEFAULT_PRIORITY = 128
"""The priority where nothing says otherwise: the middle, so that both sides have room."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What a queue's owner may set, and when. Lengths in the unit named; retention 0 = for ever."""

    filter: str
    priority: str = ""
    max_attempts: int = 5
    lease_ms: int = 30_000
    max_lease_ms: int = MAX_LEASE_MS
    done_retention_s: int = 86_400
    max_in_flight: int = 100_000
    created_at_ms: int = 0
    updated_at_ms: int = 0
    revision: int = 0
    others: tuple[tuple[str, str], ...] = ()
    """Stored settings that this version does not know, kept as they are."""

    def changed(self, **settings: str | int) -> QueueSettings:
        """A copy with other settings."""
        return replace(self, **settings)  # type: ignore[arg-type]

    def record(self) -> QueueConfigRecord:
        """The stored form. Settings at their default are left out: most queues keep them."""
        settings = dict(self.others)
        for name, default in _STORED_DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                settings[name] = str(value)
        return QueueConfigRecord(self.filter, self.max_attempts, self.done_retention_s, settings)

    @classmethod
    def from_record(cls, record: QueueConfigRecord) -> QueueSettings:
        """The settings of a stored config."""
        known = {
            name: type(default)(record.settings[name])
            for name, default in _STORED_DEFAULTS.items()
            if name in record.settings
        }
        others = tuple(
            (key, value) for key, value in record.settings.items() if key not in _STORED_DEFAULTS
        )
        return cls(
            filter=record.filter,
            max_attempts=record.max_attempts,
            done_retention_s=record.done_retention_s,
            others=others,
            **known,  # type: ignore[arg-type]
        )


_STORED_DEFAULTS: dict[str, str | int] = {
    "priority": "",
    "lease_ms": 0,  # always stored: it is the setting whose default is most likely to be retuned
    "max_lease_ms": MAX_LEASE_MS,
    "max_in_flight": 100_000,
    "created_at_ms": 0,
    "updated_at_ms": 0,
    "revision": 0,
}
