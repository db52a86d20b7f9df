"""When jobs are due."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from services.janitor.runs.timetable import Every, parse_schedule


def ms(text: str) -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("text", "length_ms"),
    [("30s", 30_000), ("15m", 900_000), (" 6h ", 21_600_000), ("7d", 604_800_000)],
)
def test_a_span_is_due_so_long_after_the_last_time_and_at_once_when_there_was_none(
    text: str, length_ms: int
) -> None:
    schedule = parse_schedule(text)

    assert schedule == Every(length_ms)
    assert schedule.after(1_000) == 1_000 + length_ms
    assert schedule.first(5) == 5


@pytest.mark.parametrize(
    ("text", "last", "due"),
    [
        ("17 3 * * *", "2026-01-01T03:16:59.999", "2026-01-01T03:17"),
        ("17 3 * * *", "2026-01-01T03:17:00.000", "2026-01-02T03:17"),
        ("*/20 8-17 * * 1-5", "2026-01-02T17:45", "2026-01-05T08:00"),  # a Friday evening
        ("0 0 29 2 *", "2026-01-01T00:00", "2028-02-29T00:00"),
        # No summer time: schedules are in UTC.
        ("30 2 * * *", "2026-03-29T00:00", "2026-03-29T02:30"),
    ],
)
def test_cron_is_due_at_the_next_time_of_the_clock(text: str, last: str, due: str) -> None:
    schedule = parse_schedule(text)

    assert schedule is not None
    assert schedule.after(ms(last)) == ms(due)
    assert schedule.first(ms(last)) == ms(due)


def test_an_empty_one_is_never() -> None:
    assert parse_schedule("") is None
    assert parse_schedule("  ") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("1w", "neither"),
        ("-5m", "neither"),
        ("1h30m", "neither"),
        ("0s", "not within 1s and 366d"),
        ("367d", "not within 1s and 366d"),
        ("* * * *", "neither"),
        ("* * * * * *", "neither"),
        ("61 * * * *", "Bad minute"),
        ("0 0 30 2 *", "Bad day-of-month"),
        ("٣m", "neither"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_schedule(text)


def test_chance_leaves_a_short_span_short() -> None:
    often, nightly = parse_schedule("1m"), parse_schedule("0 3 * * *")

    assert often is not None
    assert nightly is not None
    assert often.spread_ms(60_000) == 15_000
    assert often.spread_ms(1_000) == 1_000
    assert nightly.spread_ms(60_000) == 60_000
