"""Filters and priorities see all metadata of a message: its times, its retention, its ID."""

from __future__ import annotations

import pytest

from libs.filters import FilterError, RuleSet, check, facts

HEADERS = {"kind": "a"}
FIELDS = (700, 1_000, 2_000, 0, 3_600)


@pytest.mark.parametrize(
    ("source", "fields", "delay_ms", "matched"),
    [
        ("message_id == 700", FIELDS, -1, True),
        ("message_id % 10 == 1", FIELDS, -1, False),
        ("retention == duration('1h')", FIELDS, -1, True),
        ("retention > duration('1h')", FIELDS, -1, False),
        ("retention == duration('0s')", (700, 1_000, 2_000, 0, 0), -1, True),
        ("received_at + retention < timestamp('1970-01-01T01:00:03Z')", FIELDS, -1, True),
        ("visible_at == received_at", FIELDS, -1, True),
        ("visible_at == received_at", FIELDS, 0, True),
        ("visible_at - received_at == duration('5s')", FIELDS, 5_000, True),
        ("visible_at == timestamp('1970-01-01T00:00:09Z')", (7, 1, 2, 9_000, 0), -1, True),
        ("visible_at > created_at && size == 4", FIELDS, -1, True),
    ],
)
def test_a_filter_sees_them(
    source: str, fields: tuple[int, int, int, int, int], delay_ms: int, matched: bool
) -> None:
    rules = RuleSet()
    rules.replace("q", source)
    assert [queue for queue, _ in rules.route(HEADERS, fields, delay_ms, 4)] == ["q"] * matched
    [outcome] = rules.explain(facts(HEADERS, fields, delay_ms, 4))
    assert outcome.matched == matched


def test_a_priority_sees_them() -> None:
    rules = RuleSet()
    rules.replace("q", "true", "retention == duration('1h') ? message_id % 256 : 0")
    assert rules.route(HEADERS, FIELDS, -1, 4) == [("q", 700 % 256)]
    assert rules.priority("q", HEADERS, FIELDS, -1, 4) == 700 % 256


@pytest.mark.parametrize("source", ["retention > 5", "visible_at == 'now'", "message_id == '7'"])
def test_their_types_are_checked(source: str) -> None:
    with pytest.raises(FilterError, match="is not possible"):
        check(source)


def test_queues_that_read_different_variables_see_them_in_one_message() -> None:
    rules = RuleSet()
    rules.replace("a", "message_id == 700")
    rules.replace("b", "created_at < received_at")
    rules.replace("c", "retention == duration('1h') && message_id == 700")
    rules.replace("d", "size == 4 && headers.exists(k, k == 'kind')")
    assert [queue for queue, _ in rules.route(HEADERS, FIELDS, -1, 4)] == ["a", "b", "c", "d"]


def test_the_rules_know_whether_an_expression_reads_message_ids() -> None:
    rules = RuleSet()
    rules.replace("plain", "size > 1", "size % 256")
    seen = [rules.reads_ids]
    rules.replace("sampled", "message_id % 100 == 0")
    rules.replace("ranked", "true", "message_id % 256")
    seen.append(rules.reads_ids)
    rules.remove("sampled")
    seen.append(rules.reads_ids)
    rules.replace("ranked", "true")
    seen.append(rules.reads_ids)
    assert seen == [False, True, True, False]


@pytest.mark.parametrize("source", ["headers.n > 5", "5.0 <= headers.n", "headers.n + 1 == 2"])
def test_a_header_beside_a_number_gets_a_hint(source: str) -> None:
    with pytest.raises(FilterError, match=r"is not possible; .*int\(headers\.n\)"):
        check(source)
    check("int(headers.n) > 5")
