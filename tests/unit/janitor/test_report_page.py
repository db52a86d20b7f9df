"""The page of a report: whole by itself, and true to its numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any, Final
from xml.etree import ElementTree

import pytest

from services.janitor.jobs.report_page import (
    ATTEMPTS,
    Series,
    amount,
    bars,
    duration,
    lines,
    page,
    ranks,
    size,
)

NOW_MS = 1_767_312_000_000  # 2026-01-02


def row(queue: str | None, day: date, **value: Any) -> dict[str, Any]:
    counts = ("published", "acked", "failed", "waiting")
    empty: dict[str, Any] = {f"{name}_count": 0 for name in counts}
    empty |= {f"attempts_{name}_count": 0 for name, _, _ in ATTEMPTS}
    empty |= {
        f"{of}_ms_{point}": None for of in ("claim", "ack") for point in ("p50", "p95", "p99")
    }
    empty |= {"published_bytes": 0, "oldest_waiting_at": None}
    return {"queue": queue, "day": day, **empty, **value}


ROWS = [
    row(
        queue,
        date(2026, 1, 1),
        published_count=1200,
        published_bytes=3 << 20,
        acked_count=1000,
        failed_count=3,
        waiting_count=197,
        attempts_1_count=990,
        ack_ms_p50=40,
        ack_ms_p95=1500,
        ack_ms_p99=90_000,
        claim_ms_p50=4,
        oldest_waiting_at=datetime(2026, 1, 1, 18, tzinfo=UTC),
    )
    for queue in (None, "<orders>")
]


def test_the_page_is_whole_and_loads_nothing() -> None:
    result = page("run-1", NOW_MS, ROWS, 3)

    document = ElementTree.fromstring(re.sub(r"<!DOCTYPE html>|<meta[^>]*>", "", result))

    assert document.tag == "html"
    assert not re.search(r"https?:|<script|<link|@import|url\(|src=", result)
    assert '<meta name="viewport"' in result
    assert "prefers-color-scheme:dark" in result
    assert "&lt;orders&gt;" in result
    assert "<orders>" not in result


def test_the_page_shows_the_numbers() -> None:
    result = page("run-1", NOW_MS, ROWS, 3)

    for number in ("1,200", "1,000", "6 h", "3 MiB", "2025-12-31", "2026-01-02"):
        assert number in result, number
    assert "2026-01-01: 1.5 s (95 %)" in result
    assert "2026-01-01: 1.2k published" in result


def test_the_page_says_how_many_queues_are_not_on_it() -> None:
    assert "1 of 63: the busiest" in page("run-1", NOW_MS, ROWS, 3, 63)
    assert "the busiest" not in page("run-1", NOW_MS, ROWS, 3, 1)


def test_a_page_of_nothing_is_a_page() -> None:
    result = page("run-1", NOW_MS, [], 1)

    assert "None." in result
    assert "–" in result


@pytest.mark.parametrize("value", [0, 1, 999, 10**7])
def test_charts_stay_within_their_frame(value: int) -> None:
    days = [date(2026, 1, n) for n in range(1, 31)]
    series = [Series("a", [value] * 30), Series("b", [None] * 30)]

    for chart in (bars(days, series, str), lines(days, series, str), ranks([("a", value)], str)):
        for x, width in re.findall(r'<rect x="([-\d.]+)"[^>]* width="([-\d.]+)"', chart):
            assert 0 <= float(x) <= float(x) + float(width) <= 361
        for y, height in re.findall(r' y="([-\d.]+)"[^>]* height="([-\d.]+)"', chart):
            assert 0 <= float(y) <= float(y) + float(height) <= 191
        for y in re.findall(r'cy="([-\d.]+)"', chart):
            assert 0 <= float(y) <= 191


CHARACTER: Final = 7
"""The most that one of a label takes, on average, in DejaVu Sans, the widest of common fonts."""


@pytest.mark.parametrize(
    ("draw", "record"), [(bars, size), (bars, amount), (lines, duration), (lines, amount)]
)
@pytest.mark.parametrize("exponent", range(13))
@pytest.mark.parametrize("first", [1, 2, 5])
def test_the_labels_of_an_axis_fit_beside_it(
    draw: Callable[..., str], record: Callable[[float], str], exponent: int, first: int
) -> None:
    chart = draw([date(2026, 1, 1)], [Series("a", [first * 10**exponent])], record)

    labels = re.findall(r'<text x="(\d+)"[^>]* text-anchor="end">([^<]+)</text>', chart)
    assert len(labels) >= 2
    for right, text in labels:
        assert len(text) * CHARACTER <= int(right), text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999.4 * 1024**2, "999 MiB"),
        (1000 * 1024**2, "0.977 GiB"),
        (1023 * 1024**2, "0.999 GiB"),
        (1023, "1023 B"),
    ],
)
def test_a_size_just_below_the_next_unit_has_three_digits(value: float, text: str) -> None:
    assert size(value) == text


def test_counts_have_three_digits() -> None:
    assert [amount(count) for count in (999, 1500, 999_499, 999_999, 47_700_000)] == [
        *("999", "1.5k", "999k", "1M", "47.7M"),
    ]


def test_units_are_those_of_people() -> None:
    assert [duration(ms) for ms in (0, 999, 1500, 90_000, 7_200_000, 180_000_000)] == [
        *("0 ms", "999 ms", "1.5 s", "1.5 min", "2 h", "2.08 d"),
    ]
    assert [size(count) for count in (0, 1023, 1024, 3 << 20)] == [
        "0 B",
        "1023 B",
        "1 KiB",
        "3 MiB",
    ]
