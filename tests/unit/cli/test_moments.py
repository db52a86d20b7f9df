import time

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq._admin.queue_models import Backoff, BackoffKind
from slatemq.cli.parameters import (
    BACKOFF,
    START,
    TIME,
    WHEN,
    FromNow,
    format_backoff,
    format_time,
    parse_time,
)


@pytest.mark.parametrize(
    ("text", "backoff"),
    [
        ("fixed:10s", Backoff.fixed(10)),
        ("linear:5s..1m", Backoff.linear(5, max=60)),
        ("exponential:1s..10m", Backoff.exponential(1, max=600)),
        (
            "exponential:500ms..1h,multiplier=3,jitter=0.5",
            Backoff(BackoffKind.EXPONENTIAL, 500, 3_600_000, 3.0, 0.5),
        ),
        ("fixed:1m,jitter=1", Backoff.fixed(60, jitter=1.0)),
    ],
)
def test_a_backoff_is_read_and_written_alike(text: str, backoff: Backoff) -> None:
    assert BACKOFF.convert(text, None, None) == backoff
    assert format_backoff(backoff) == text
    assert BACKOFF.convert(format_backoff(backoff), None, None) == backoff


def test_no_backoff_has_a_word() -> None:
    assert BACKOFF.convert("none", None, None) == Backoff.none()
    assert format_backoff(Backoff.none()) == "none"


@pytest.mark.parametrize(
    "text", ["", "exponential", "exponential:", "fixed:10", "quadratic:1s", "fixed:1s,jitter=1.2.3"]
)
def test_what_is_no_backoff_is_refused_with_words(text: str) -> None:
    with pytest.raises(click.BadParameter):
        BACKOFF.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("linear:5s..1m,multiplier=2", "linear has no multiplier, only jitter"),
        ("fixed:5s,multiplier=2", "fixed has no multiplier"),
        ("fixed:5s..1m", "fixed is always the same wait"),
        ("exponential:1s,factor=2", "exponential has no factor, only multiplier and jitter"),
        ("exponential:1s,", "no such parameter"),
        ("exponential:1s,jitter=", "jitter must be a number"),
        ("exponential:1s,jitter=nan", "jitter must be a number, not 'nan'"),
        ("exponential:1s,jitter=1,jitter=0", "jitter is given twice"),
    ],
)
def test_a_parameter_that_a_backoff_does_not_have_is_named(text: str, why: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        BACKOFF.convert(text, None, None)
    assert why in refused.value.message


def test_the_parameters_of_a_backoff_come_in_any_order() -> None:
    assert BACKOFF.convert("exponential:1s,jitter=.5,multiplier=3", None, None) == BACKOFF.convert(
        "exponential:1s,multiplier=3,jitter=0.5", None, None
    )


def test_a_time_may_be_so_long_from_now() -> None:
    before = int(time.time() * 1000)
    when = WHEN.convert("+5m", None, None)
    assert isinstance(when, FromNow)
    assert before + 300_000 <= when <= int(time.time() * 1000) + 300_000
    assert WHEN.convert("1767225600000", None, None) == 1_767_225_600_000
    assert not isinstance(WHEN.convert("2026-01-01T00:00:00Z", None, None), FromNow)


@pytest.mark.parametrize("text", ["+", "+5", "soon", "+-5m", "2026-01-01T00:00:00"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        WHEN.convert(text, None, None)


def test_a_start_is_a_word_a_time_or_so_long_ago() -> None:
    assert START.convert("now", None, None) == "now"
    assert START.convert("beginning", None, None) == "beginning"
    assert START.convert("2026-01-01T00:00:00Z", None, None) == 1_767_225_600_000
    ago = START.convert("-2h", None, None)
    assert 0 <= int(time.time() * 1000) - 7_200_000 - ago < 60_000
    assert START.convert("-49000d", None, None) == 0


@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_any_time_is_written_and_one_since_1970_is_read_again(time_ms: int) -> None:
    text = format_time(time_ms)

    if time_ms >= 0:
        assert parse_time(text) == time_ms


@pytest.mark.parametrize(
    ("time_ms", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        (253_402_300_800_000, "253402300800000"),
        ((1 << 63) - 1, "9223372036854775807"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (-(1 << 63), "-9223372036854775808"),
    ],
)
def test_a_time_that_has_no_date_is_written_as_its_number(time_ms: int, text: str) -> None:
    assert format_time(time_ms) == text


def test_a_time_that_no_message_can_have_is_refused() -> None:
    with pytest.raises(click.BadParameter):
        TIME.convert(str(1 << 63), None, None)
