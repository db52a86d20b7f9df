import pytest
from hypothesis import given
from hypothesis import strategies as st

from slatemq.cli.parameters import DURATION_MS_MAX, format_duration, parse_duration


@pytest.mark.parametrize(
    ("text", "length_ms"),
    [
        ("500ms", 500),
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("7d", 604_800_000),
        ("1h30m", 5_400_000),
        ("1m500ms", 60_500),
        ("1d2h3m4s5ms", 93_784_005),
        ("0", 0),
        ("0s", 0),
        ("4294967295s", DURATION_MS_MAX),
    ],
)
def test_a_duration_is_read(text: str, length_ms: int) -> None:
    assert parse_duration(text) == length_ms


@pytest.mark.parametrize(
    "text",
    [
        *("", "30", "s", "-5s", "+5s", "5 s", "5S", "1.5h", "30m1h", "1s1s", "5w", "٣s", "1h,"),
        *(" 1h", "4294967296s", "9" * 5000 + "d"),
    ],
)
def test_what_is_no_duration_is_refused_with_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"duration|too long"):
        parse_duration(text)


@given(st.integers(0, DURATION_MS_MAX))
def test_what_is_written_is_read_back(length_ms: int) -> None:
    assert parse_duration(format_duration(length_ms)) == length_ms


def test_no_time_at_all_has_a_unit_as_well() -> None:
    assert format_duration(0) == "0s"
