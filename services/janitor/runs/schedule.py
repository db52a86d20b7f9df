"""When a job is due: every so often, or by a cron expression.

1h    30m    1d                 after the last time
17 3 * * *    */20 8-17 * * 1-5 minute, hour, day, month, weekday, in UTC
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol

from cronsim import CronSim, CronSimError

_SPAN: Final = re.compile(r"(\d{1,9})(s|m|h|d)", re.ASCII)
_UNIT_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

_EVERY_MS_MIN: Final = 1_000
_EVERY_MS_MAX: Final = 366 * _UNIT_MS["d"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)


class Schedule(Protocol):
    """When a job is due. Times in ms since 1970."""

    def after(self, last_ms: int) -> int:
        """The first time after this one."""

    def first(self, now_ms: int) -> int:
        """The first time for a job that was never done."""

    def spread_ms(self, most_ms: int) -> int:
        """How much later it may begin by chance, of at most `most_ms`."""


@dataclass(frozen=True)
class Every:
    """So long after the last time; at once for a job that was never done."""

    length_ms: int

    def after(self, last_ms: int) -> int:
        return last_ms + self.length_ms

    def first(self, now_ms: int) -> int:
        return now_ms

    def spread_ms(self, most_ms: int) -> int:
        return min(most_ms, self.length_ms // 4)


@dataclass(frozen=True)
class Cron:
    """At times of the clock, in UTC."""

    expression: str

    def after(self, last_ms: int) -> int:
        return (next(CronSim(self.expression, _EPOCH + last_ms * _MS)) - _EPOCH) // _MS

    def first(self, now_ms: int) -> int:
        return self.after(now_ms)

    def spread_ms(self, most_ms: int) -> int:
        return most_ms


def parse_schedule(text: str) -> Schedule | None:
    """The schedule of a setting; None for an empty one: never. Raises ValueError, saying why."""
    text = text.strip()
    if not text:
        return None
    span = _SPAN.fullmatch(text)
    if span is not None:
        length_ms = int(span[1]) * _UNIT_MS[span[2]]
        if not _EVERY_MS_MIN <= length_ms <= _EVERY_MS_MAX:
            raise ValueError(f"{text!r} is not within 1s and 366d")
        return Every(length_ms)
    if len(text.split()) != 5:
        raise ValueError(
            f"{text!r} is neither a time such as 30m, 6h or 1d nor the five fields of cron"
        )
    schedule = Cron(text)
    try:
        schedule.after(0)
    except CronSimError as error:
        raise ValueError(f"{text!r}: {error}") from None
    except StopIteration:
        raise ValueError(f"{text!r} never comes") from None
    return schedule
