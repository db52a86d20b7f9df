"""What a query wants of a table, as far as it narrows the keys: queues, times, IDs, shards.

Spark passes its filters before it plans a scan. Those that narrow nothing are ignored here, and
Spark applies all of them to the rows again; so this may keep too much, never too little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final, NamedTuple

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_SHARDS: Final = ("ingest_shard", "broker_shard")


@dataclass(frozen=True)
class RowFilter:
    """Which rows may be wanted; None is no bound. Both ends are included.

    `first_ms` and `last_ms` bound the table's time column.
    """

    queues: frozenset[str] | None = None
    shards: frozenset[int] | None = None
    first_ms: int | None = None
    last_ms: int | None = None
    first_id: int | None = None
    last_id: int | None = None

    @property
    def nothing(self) -> bool:
        times = (self.first_ms, self.last_ms)
        ids = (self.first_id, self.last_id)
        return any(
            low is not None and high is not None and low > high for low, high in (times, ids)
        )


EVERYTHING: Final = RowFilter()


def wanted_by(filters: Iterable[Filter], time_column: str) -> RowFilter:
    """The rows that all of these filters together may let through.

    `time_column` is the column by whose time rows are in order; `day` is the day of it.
    """
    wanted = EVERYTHING
    for one in filters:
        bounds = _bounds(one)
        path: tuple[str, ...] = getattr(one, "attribute", ())
        column = path[0] if len(path) == 1 else ""
        if bounds is None:
            continue
        if column == "queue" and bounds.values is not None:
            wanted = replace(wanted, queues=_both(wanted.queues, bounds.values))
        elif column in _SHARDS and bounds.values is not None:
            wanted = replace(wanted, shards=_both(wanted.shards, bounds.values))
        elif column == "message_id":
            wanted = replace(
                wanted,
                first_id=_tighter(wanted.first_id, bounds.low, max),
                last_id=_tighter(wanted.last_id, bounds.high, min),
            )
        elif time_column and column in (time_column, "day"):
            wanted = replace(
                wanted,
                first_ms=_tighter(wanted.first_ms, _first_ms(bounds.low), max),
                last_ms=_tighter(wanted.last_ms, _last_ms(bounds.high), min),
            )
    return wanted


class _Bounds(NamedTuple):
    """What a filter allows: the values themselves where they are known, and their ends."""

    values: frozenset[Any] | None
    low: Any
    high: Any


def _bounds(one: Filter) -> _Bounds | None:
    match one:
        case EqualTo() | EqualNullSafe() if one.value is not None:
            return _Bounds(frozenset((one.value,)), one.value, one.value)
        case In():
            values = frozenset(value for value in one.value if value is not None)
            return _Bounds(values, min(values), max(values)) if values else None
        case GreaterThan():
            return _Bounds(None, _beside(one.value, 1), None)
        case GreaterThanOrEqual():
            return _Bounds(None, one.value, None)
        case LessThan():
            return _Bounds(None, None, _beside(one.value, -1))
        case LessThanOrEqual():
            return _Bounds(None, None, one.value)
    return None


def _beside(value: Any, step: int) -> Any:
    """The next day or number in a direction; a time itself, which has no next one in ms."""
    if isinstance(value, date) and not isinstance(value, datetime):
        end = date.max if step > 0 else date.min  # beside which there is none: a day too many
        return value if value == end else value + timedelta(days=step)
    return value + step if isinstance(value, int) else value


def _both(known: frozenset[Any] | None, values: frozenset[Any]) -> frozenset[Any]:
    return values if known is None else known & values


def _tighter(known: int | None, other: int | None, choose: Callable[[int, int], int]) -> int | None:
    if known is None or other is None:
        return other if known is None else known
    return choose(known, other)


def _first_ms(low: date | datetime | None) -> int | None:
    """The first millisecond of a time, or of a day in UTC."""
    if low is None:
        return None
    return (_moment(low) - _EPOCH) // _MS


def _last_ms(high: date | datetime | None) -> int | None:
    if high is None:
        return None
    if not isinstance(high, datetime):
        return (_moment(high) - _EPOCH + timedelta(days=1)) // _MS - 1
    return (_moment(high) - _EPOCH) // _MS


def _moment(value: date | datetime) -> datetime:
    if not isinstance(value, datetime):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    # Spark's timestamps are moments; one without a zone comes from a session in UTC.
    return value if value.tzinfo else value.replace(tzinfo=UTC)
