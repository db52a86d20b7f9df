from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from slatemq._consume.finishing import nack_of
from slatemq._consume.handles import shard_of
from slatemq._publish.wire import size_of
from slatemq.errors import InvalidArgument
from slatemq.models import milliseconds, outgoing, seconds, time_ms


def test_spans_are_seconds_or_timedeltas() -> None:
    assert seconds(timedelta(minutes=1)) == seconds(60) == 60.0
    assert milliseconds(1.5) == milliseconds(timedelta(milliseconds=1500)) == 1500
    assert milliseconds(0) == 0
    # A positive span is never rounded to nothing: 0 means something else everywhere
    assert milliseconds(0.0001) == 1


def test_times_are_milliseconds_or_datetimes_with_a_zone() -> None:
    assert time_ms(5) == 5
    assert time_ms(datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)) == 1500
    with pytest.raises(InvalidArgument, match=r"visible_at: .*time zone"):
        time_ms(datetime(2026, 1, 1), "visible_at")


def test_a_retention_is_whole_seconds() -> None:
    assert outgoing("ü", retention=timedelta(hours=1)).retention_s == 3600
    assert outgoing("ü").payload == "ü".encode()
    with pytest.raises(InvalidArgument) as refused:
        outgoing("x", retention=1.5)
    assert refused.value.field == "retention"
    with pytest.raises(InvalidArgument, match="seconds or a timedelta, not str") as refused:
        outgoing("x", retention="1h")  # type: ignore[arg-type]
    assert refused.value.field == "retention"


def test_headers_are_taken_as_they_are_now() -> None:
    headers = {"a": "1"}
    message = outgoing("x", headers)
    headers["a"] = "2"
    assert message.headers == {"a": "1"}


@pytest.mark.parametrize("token", ["", "0", "zz", "0-", "-0123456789abcdef", "0-" + "x" * 100])
def test_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        shard_of(token)
    assert refused.value.reason == "NOT_A_LEASE_TOKEN"


def test_a_token_names_its_shard() -> None:
    assert shard_of("1f-0123456789abcdef") == 31


@pytest.mark.parametrize("delay", [-1, timedelta(hours=12, seconds=1)])
def test_delays_beyond_the_bounds_are_refused(delay: float | timedelta) -> None:
    with pytest.raises(InvalidArgument):
        nack_of("0-0", delay=delay)


def test_reasons_are_cut_to_whole_characters() -> None:
    assert nack_of("0-0", "x" + "é" * 1000).reason == "x" + "é" * 511


@pytest.mark.parametrize("value", [5, None])
def test_a_header_of_a_wrong_type_is_named(value: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        size_of(outgoing("x", {"a": "1", "b": value}))
    assert refused.value.field == "headers['b']"
