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


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ('headers.a == "x" && headers["b"] != "y"', {"a", "b"}),
        ('has(headers.a) || "b" in headers || size > 3', {"a", "b"}),
        ('["x"].exists(one, one == headers.a)', {"a"}),
        ('headers.a.startsWith("x") ? true : headers.b == "y"', {"a", "b"}),
        ("size > 3", set()),
        ('headers.exists(key, key == "a")', None),
        ('headers[headers.a] == "x"', None),
        ("size(headers) > 1 && headers.a == 'x'", None),
    ],
)
def test_the_keys_of_headers_that_an_expression_depends_on(
    source: str, keys: set[str] | None
) -> None:
    assert check(source).keys == keys
