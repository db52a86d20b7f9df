"""Answers in SQL as JSON has them, on machines anywhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import Row
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DateType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from services.janitor.spark.sql import _check_names, _text, plain


@pytest.fixture(params=["UTC", "America/New_York", "Asia/Kolkata"])
def _anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("_anywhere")
@pytest.mark.parametrize(
    ("moment", "text"),
    [
        (datetime(2026, 7, 1, 12, tzinfo=UTC), "2026-07-01T12:00:00.000Z"),
        (datetime(2026, 11, 1, 5, 30, tzinfo=UTC), "2026-11-01T05:30:00.000Z"),
        # In New York half past one comes twice.
        (datetime(2026, 11, 1, 6, 30, tzinfo=UTC), "2026-11-01T06:30:00.000Z"),
        (datetime(2026, 1, 2, 3, 4, 5, 678_000, tzinfo=UTC), "2026-01-02T03:04:05.678Z"),
        (datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC), "2026-01-02T03:04:05.678901Z"),
    ],
)
def test_moments_are_reported_in_utc_wherever_the_machine_is(moment: datetime, text: str) -> None:
    kind = TimestampType()
    # As Spark makes it of what comes from its JVM: in the time of this machine.
    local = kind.fromInternal(int(moment.timestamp() * 1_000_000))

    assert plain(local, kind) == text


@pytest.mark.parametrize("digits", ["9007199254740993", "12345678901234567.89", "0.10", "1000"])
def test_decimals_keep_their_digits(digits: str) -> None:
    kind, value = DecimalType(20, 2), Decimal(digits)

    assert _text(value, kind) == digits
    expected = float(digits) if "." in digits else int(digits)
    assert json.loads(json.dumps(plain(value, kind))) == expected


def test_no_object_has_two_columns_of_one_name() -> None:
    _check_names(["queue", "count", "Queue"])
    with pytest.raises(ValueError, match="several columns are named queue: name them apart"):
        _check_names(["queue", "reason", "queue"])


made: Any = Row
"""Rows without names, whose values have types that its stubs do not know."""


def test_whatever_a_query_gives_becomes_json() -> None:
    kind = (
        StructType()
        .add("bytes", BinaryType())
        .add("clock", TimestampNTZType())
        .add("day", DateType())
        .add("days", ArrayType(DateType()))
        .add("sizes", MapType(LongType(), StructType().add("sum", DecimalType(10, 2))))
        .add("share", DoubleType())
        .add("took", DayTimeIntervalType())
        .add("none", StringType())
    )
    day = date(2026, 7, 1)
    row = made(
        bytearray(b"\xff\x00"),
        datetime(2026, 7, 1, 12),
        day,
        [day, None],
        {5: made(Decimal("1.50"))},
        float("nan"),
        timedelta(minutes=1),
        None,
    )

    assert json.loads(json.dumps(plain(row, kind), allow_nan=False)) == {
        "bytes": "/wA=",
        "clock": "2026-07-01T12:00:00",
        "day": "2026-07-01",
        "days": ["2026-07-01", None],
        "sizes": {"5": {"sum": 1.5}},
        "share": None,
        "took": "0:01:00",
        "none": None,
    }
