from slatemq.errors import Unavailable
from slatemq.otel import HEADER_BYTES_MAX, HEADERS_MAX, error_type, inject

CARRIED = {"traceparent": "00-1-2-01", "tracestate": "a=b"}


def test_a_context_goes_into_the_headers() -> None:
    headers = {"a": "b"}
    inject(headers, CARRIED)
    assert headers == {"a": "b", **CARRIED}


def test_a_context_that_is_there_stays() -> None:
    headers = {"traceparent": "mine"}
    inject(headers, CARRIED)
    assert headers == {"traceparent": "mine"}


def test_a_context_is_left_out_where_it_has_no_room() -> None:
    full = {f"h{n}": "" for n in range(HEADERS_MAX)}
    inject(full, CARRIED)
    assert len(full) == HEADERS_MAX

    nearly = {f"h{n}": "" for n in range(HEADERS_MAX - 1)}
    inject(nearly, CARRIED)
    assert "traceparent" in nearly
    assert "tracestate" not in nearly

    headers: dict[str, str] = {}
    inject(headers, {"traceparent": "x", "tracestate": "y" * (HEADER_BYTES_MAX + 1)})
    assert headers == {"traceparent": "x"}


def test_errors_are_reported_by_their_reason() -> None:
    assert error_type(Unavailable("x", reason="STARTING")) == "STARTING"
    assert error_type(ValueError("x")) == "ValueError"
