"""Which values of a header a filter can match, as far as its source proves it."""

from __future__ import annotations

import pytest

from libs.filters import check, values_of


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ('headers.queue == "a"', {"a"}),
        ('headers["queue"] == "a" && size > 0', {"a"}),
        ('headers.queue in ["a", "b"] && headers.kind == "x"', {"a", "b"}),
        ('headers.queue == "a" || headers.queue == "b"', {"a", "b"}),
        ('headers.queue == "a" || size > 0', None),
        ('headers.queue == "a" || headers.kind == "x"', None),
        ('headers.queue != "a"', None),
        ('headers.kind == "x"', None),
        ('headers.queue == "a" ? headers.kind == "x" : headers.queue == "b"', {"a", "b"}),
        ('!(headers.queue == "a")', None),
        ("true", None),
        ("false", set()),
        ('"queue" in headers && headers.queue.startsWith("a")', None),
    ],
)
def test_the_values_of_a_header_that_a_filter_can_match(
    source: str, values: set[str] | None
) -> None:
    assert values_of(check(source).equalities, "queue") == values
