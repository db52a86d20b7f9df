"""The settings of a queue, its backoff among them, and their stored form.

Pure: the jitter of a backoff comes from the lease's token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any

from libs.storage.errors import CorruptRecord
from libs.storage.layout.partitions import Partition
from libs.storage.records.configs import QueueConfigRecord

MAX_LEASE_MS = 43_200_000
"""12 h, the longest lease of any queue, as in other message queues."""

MAX_TOTAL_LEASE_MS = 604_800_000
"""7 days, the longest that any queue lets one claim hold a message, extensions included."""

DEFAULT_PRIORITY = 128
"""The priority of messages that have none: the middle, with room on both sides."""


BACKOFF_MS_MAX = 43_200_000
"""12 h: as long as the longest delay of a nack."""

MULTIPLIER_DEFAULT = 2.0
MULTIPLIER_MAX = 100.0

_JITTER_STEPS = 256
"""Different waits by jitter: more would spread what fails together over that many records."""

_SPREAD = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, and odd: the top bits of a product depend on all of a token."""


def _step_of(token: int) -> int:
    """One of the jitter steps, by the whole token: its last bits only count a claim's leases."""
    return (token * _SPREAD & (1 << 64) - 1) >> 56


class BackoffKind(Enum):
    """How the wait grows with the attempts; values are stored."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The rule of a queue. `jitter` is the share of the wait, 0 to 1, that is random."""

    kind: BackoffKind
    initial_ms: int
    max_ms: int = BACKOFF_MS_MAX
    multiplier: float = MULTIPLIER_DEFAULT
    jitter: float = 0.0

    def wait_ms(self, attempts: int, token: int) -> int:
        """The wait after this many failed attempts, from 1; the token is of the last lease."""
        wait_ms = self._longest_ms(attempts)
        if not self.jitter:
            return wait_ms
        chance = _step_of(token) / (_JITTER_STEPS - 1)
        return math.ceil(wait_ms * (1 - self.jitter * chance))

    def _longest_ms(self, attempts: int) -> int:
        match self.kind:
            case BackoffKind.FIXED:
                return self.initial_ms
            case BackoffKind.LINEAR:
                return min(self.initial_ms * attempts, self.max_ms)
            case BackoffKind.EXPONENTIAL:
                try:
                    grown = self.initial_ms * self.multiplier ** (attempts - 1)
                except OverflowError:
                    return self.max_ms
                return int(min(grown, self.max_ms))

    def text(self) -> str:
        """The stored form: `<kind> <initial ms> <longest ms> <multiplier> <jitter>`."""
        return (
            f"{self.kind.value} {self.initial_ms} {self.max_ms} {self.multiplier!r} {self.jitter!r}"
        )

    @classmethod
    def parse(cls, text: str) -> Backoff:
        kind, initial_ms, max_ms, multiplier, jitter = text.split(" ")
        return cls(
            BackoffKind(kind), int(initial_ms), int(max_ms), float(multiplier), float(jitter)
        )


DEFAULT_BACKOFF = Backoff(BackoffKind.EXPONENTIAL, 1_000, 600_000, multiplier=5.0, jitter=0.5)
"""For queues whose owner sets none: 1, 5, 25 and 125 s. The five default attempts then take at
least 78 s, so what a worker needs may be down for a minute before messages become dead letters."""


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
    partition: Partition | None = None
    """Which part of the queue this is; None: all of it."""
    owner: str = ""
    """The principal that was the last to set the filter or the priority; empty without a policy."""
    filter_cost: int = 0
    priority_cost: int = 0
    """What these cost, as far as the owner has set them; see `libs.filters.Checked.cost`."""
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

    @property
    def partitions_count(self) -> int:
        """How many partitions the queue has; 0: it is not partitioned."""
        return 0 if self.partition is None else self.partition.count

    def accepts(self, source: QueueSettings) -> bool:
        """Whether messages of that queue may move in: not where their headers must decide."""
        partition = self.partition
        if partition is None or partition.count == 1 or not partition.ordering_header:
            return True
        return partition == source.partition  # The same headers have decided the same.

    @property
    def cost(self) -> int:
        return self.filter_cost + self.priority_cost

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
        """The settings of their stored form. Raises CorruptRecord."""
        try:
            known = {
                name: parse(record.settings[name])
                for name, parse in _STORED.items()
                if name in record.settings
            }
        except ValueError as error:
            raise CorruptRecord("config value", f"a setting is damaged: {error}") from error
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
    "partition": Partition.parse,
    "owner": str,
    "filter_cost": int,
    "priority_cost": int,
    "created_at_ms": int,
    "updated_at_ms": int,
    "revision": int,
}
"""The settings that are stored as text, with their parsers."""


def _text(value: Any) -> str:
    if isinstance(value, Backoff | Partition):
        return value.text()
    return str(int(value) if isinstance(value, bool) else value)
