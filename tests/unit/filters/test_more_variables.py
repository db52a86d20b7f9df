"""Variables beside those of every message, as a redrive's filter has them."""

from __future__ import annotations

import pytest

from libs.filters import (
    CONTENT_VARIABLES,
    Facts,
    Filter,
    FilterError,
    check,
    context,
    timestamp,
)
from libs.filters.signatures import Type

MORE: dict[str, Type] = {
    "reason": "string",
    "attempts": "int",
    "failed_at": "timestamp",
    "tags": ("list", "string"),
}
ALL = {**CONTENT_VARIABLES, **MORE}
VALUES = {
    "reason": "nack: timeout",
    "attempts": 3,
    "failed_at": timestamp(1_767_225_600_000),
    "tags": ["a", "b"],
}
LETTER = context(Facts({"tier": "gold"}, 1000, 2000, 7), CONTENT_VARIABLES, VALUES)


@pytest.mark.parametrize(
    ("source", "matched"),
    [
        ("attempts == 3", True),
        ("attempts > 3", False),
        ("reason.contains('timeout') && headers.tier == 'gold'", True),
        ("reason == 'nack: timeout' && size == 8", False),
        ("failed_at == timestamp('2026-01-01T00:00:00Z')", True),
        ("failed_at - created_at > duration('1h')", True),
        ("failed_at.getFullYear() == 2025", False),
        ("tags.exists(tag, tag == 'b')", True),
        ("tags.all(one, one < reason)", True),
        ("attempts * size == 21", True),
        ("reason in headers", False),
    ],
)
def test_they_are_seen_beside_the_others(source: str, matched: bool) -> None:
    made = Filter(source, ALL)
    outcome = made.explain(LETTER)
    assert (outcome.matched, outcome.error) == (matched, "")
    assert made.checked.variables == {
        name for name in ("headers", "created_at", "received_at", "size", *MORE) if name in source
    }


@pytest.mark.parametrize(
    ("column", "source"),
    [
        (1, "attempts == '3'"),
        (1, "reason > 5"),
        (1, "attempts"),
        (1, "failed_at < 5"),
        (1, "attempts.contains('x')"),
        (9, "true && reason"),
        (6, "tags['a'] == 'b'"),
        (1, "reason.field == 'x'"),
    ],
)
def test_their_types_are_checked(column: int, source: str) -> None:
    with pytest.raises(FilterError) as refused:
        check(source, "bool", ALL)
    assert refused.value.position == (1, column)
    assert "unknown variable" not in refused.value.message


def test_an_unknown_name_is_answered_with_all_that_there_are() -> None:
    with pytest.raises(FilterError) as refused:
        check("size > 1 && priority > 5", "bool", ALL)
    known = "headers, created_at, received_at, size, reason, attempts, failed_at, tags"
    assert refused.value.message == f"unknown variable 'priority'; there are {known}"
    assert refused.value.position == (1, 13)
    with pytest.raises(FilterError) as refused:
        check("tags.exists(mine, yours == mine)", "bool", ALL)
    assert refused.value.message == f"unknown variable 'yours'; there are {known}"


@pytest.mark.parametrize("name", MORE)
def test_elsewhere_there_is_no_such_variable(name: str) -> None:
    with pytest.raises(FilterError) as refused:
        check(f"{name} == {name}")
    known = "headers, created_at, received_at, size, visible_at, retention, message_id"
    assert refused.value.message == f"unknown variable '{name}'; there are {known}"
    # So a macro may use the name there.
    assert Filter(f"headers.exists({name}, {name} == 'tier')").matches(LETTER)


@pytest.mark.parametrize("name", [*MORE, "headers", "created_at", "received_at", "size"])
def test_a_macros_variable_may_not_shadow_them(name: str) -> None:
    for source in (
        f"headers.exists({name}, true)",
        f"tags.all({name}, {name} == 'a')",
        f"tags.exists(one, tags.exists({name}, {name} == one))",
    ):
        with pytest.raises(FilterError) as refused:
            check(source, "bool", ALL)
        assert refused.value.message == f"'{name}' cannot name a macro's variable"
        assert refused.value.position == (1, source.index(f"({name},") + 2)


def test_they_are_no_condition_on_headers() -> None:
    checked = check("reason == 'x' && headers.a == 'b'", "bool", ALL)
    assert checked.equalities is not None
    assert [dict(pairs) for pairs in map(list, checked.equalities)] == [{"a": "b"}]
    checked = check("reason == 'x'", "bool", ALL)
    assert checked.equalities is None


@pytest.mark.parametrize("time_ms", [-(2**62), 0, 2**62])
def test_every_time_is_a_timestamp(time_ms: int) -> None:
    dead_letter = context(
        Facts({}, 0, 0, 0), CONTENT_VARIABLES, {**VALUES, "failed_at": timestamp(time_ms)}
    )
    assert Filter("failed_at == failed_at", ALL).matches(dead_letter)
