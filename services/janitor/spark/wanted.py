"""What a query wants of a table, as far as it narrows the keys: queues, times, IDs, shards.

Spark tells its filters before it plans a scan. Those that narrow nothing are ignored here, and all
are applied to the rows once more; so what is kept may be too much, never too little.
"""

from __future__ import annotations

from collections.abc import Iterable
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

__all__ = ["EVERYTHING", "RowFilter", "wanted_by"]

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MS: Final = timedelta(milliseconds=1)
_SHARDS: Final = ("ingest_shard", "broker_shard")


@dataclass(frozen=True)
class RowFilter:
    """Which rows may be wanted; None is no bound. Both ends are included.

    Attributes:
        queues: Of these queues alone.
        shards: Of these shards alone.
        first_ms: Of this time (of the table's time column, in ms) or later.
        last_ms: Of this time or earlier.
        first_id: Of this message ID or above.
        last_id: Of this message ID or below.
    """

    queues: frozenset[str] | None = None
    shards: frozenset[int] | None = None
    first_ms: int | None = None
    last_ms: int | None = None
    first_id: int | None = None
    last_id: int | None = None

    @property
    def nothing(self) -> bool:
        """Whether no row can be wanted."""
        times = (self.first_ms, self.last_ms)
        ids = (self.first_id, self.last_id)
        return any(
            low is not None and high is not None and low > high for low, high in (times, ids)
        )


EVERYTHING: Final = RowFilter()


def wanted_by(filters: Iterable[Filter], time_column: str) -> RowFilter:
    """What rows all of these filters together may let through.

    `time_column` is the column by whose time rows lie in order; `day` is the day of it.
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
                first_id=_higher(wanted.first_id, bounds.low),
                last_id=_lower(wanted.last_id, bounds.high),
            )
        elif time_column and column in (time_column, "day"):
            wanted = replace(
                wanted,
                first_ms=_higher(wanted.first_ms, _first_ms(bounds.low)),
                last_ms=_lower(wanted.last_ms, _last_ms(bounds.high)),
            )
    return wanted


class _Bounds(NamedTuple):
    """What a filter allows: the values themselves where they are known, and the ends of them."""

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
    """The next day or number in a direction; of a time, that time: there is no next one in ms."""
    if isinstance(value, date) and not isinstance(value, datetime):
        end = date.max if step > 0 else date.min  # beside which there is none: a day too many
        return value if value == end else value + timedelta(days=step)
    return value + step if isinstance(value, int) else value


def _both(known: frozenset[Any] | None, values: frozenset[Any]) -> frozenset[Any]:
    return values if known is None else known & values


def _higher(known: int | None, low: int | None) -> int | None:
    return max(known, low) if known is not None and low is not None else _either(known, low)


def _lower(known: int | None, high: int | None) -> int | None:
    return min(known, high) if known is not None and high is not None else _either(known, high)


def _either(known: int | None, other: int | None) -> int | None:
    return other if known is None else known


def _first_ms(low: date | datetime | None) -> int | None:
    """The first millisecond that a time, or a day in UTC, has to do with."""
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
