from __future__ import annotations

import threading

import pytest
from celpy.celparser import CELParser
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.filters import (
    DEFAULT_FILTER,
    SOURCE_BYTES_MAX,
    Facts,
    Filter,
    FilterError,
    FilterIndex,
    Priority,
    RuleSet,
    check,
    context,
    parser,
)
from libs.filters.conditions import is_exact
from libs.filters.parser import parse
from libs.filters.signatures import FUNCTIONS, METHODS
from tests.forms import examples
from tests.unit.filters.corpus import BAD, GOOD

HEADERS = {"a": "b", "n": "6"}
FIELDS = (0, 0, 0, 0, 0)
MESSAGE = context(Facts(HEADERS, 0, 3_600_000, 7))
NAMES = st.sampled_from("abc")
KEYS = NAMES.flatmap(
    lambda k: st.sampled_from([f'headers["{k}"]', f"headers.{k}", f"headers['{k}']"])
)
VALUES = st.sampled_from(['"a"', "'b'", 'r"c"', '"\\x61"', '"""b"""'])
LEAVES = st.one_of(
    st.tuples(KEYS, VALUES).map(" == ".join),
    st.tuples(VALUES, KEYS).map(" == ".join),
    st.tuples(KEYS, VALUES).map(" != ".join),
    st.tuples(KEYS, st.lists(VALUES, max_size=3)).map(lambda p: f"{p[0]} in [{', '.join(p[1])}]"),
    st.sampled_from(["true", "false", "size > 3", "has(headers.a)", '"b" in headers']),
)
FILTERS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from([" && ", " || ", " == "]), inner).map(
            lambda p: f"({p[0]}){p[1]}({p[2]})"
        ),
        inner.map(lambda one: f"!({one})"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]}) ? ({p[1]}) : ({p[2]})"),
    ),
    max_leaves=6,
)
PIECES = st.lists(
    st.sampled_from(
        [
            "headers",
            "size",
            "created_at",
            "received_at",
            ".",
            "[",
            "]",
            "(",
            ")",
            "{",
            "}",
            '"',
            "'",
            'r"',
            "\\",
            "//",
            "&&",
            "||",
            "==",
            "!=",
            "<",
            "+",
            "-",
            "*",
            "/",
            "%",
            "!",
            "?",
            ":",
            ",",
            "in",
            "true",
            "false",
            "null",
            "1",
            "2u",
            "1.5",
            '"a"',
            ".a",
            '["a"]',
            "has(",
            ".all(x,",
            "x",
            ".map(x,",
            ".size()",
            "int(",
            'duration("1h")',
        ]
    ),
    max_size=14,
).map(" ".join)


@pytest.mark.parametrize("source", GOOD)
def test_a_good_filter_is_accepted_and_gives_a_boolean(source: str) -> None:
    outcome = Filter(source).explain(MESSAGE)
    assert isinstance(outcome.matched, bool)
    assert "not a boolean" not in outcome.error
    assert "Undefined" not in outcome.error
    assert "overload" not in outcome.error


def test_places_are_known_even_where_another_user_of_the_library_made_its_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CELParser, "CEL_PARSER", None)
    CELParser()
    monkeypatch.setattr(parser, "_PARSER", parser._Parser())
    with pytest.raises(FilterError) as refused:
        check('headers[true] == "a"')
    assert refused.value.position == (1, 9)


@pytest.mark.parametrize(("column", "source"), BAD)
def test_a_bad_filter_is_refused_where_it_is_bad(column: int, source: str) -> None:
    with pytest.raises(FilterError) as refused:
        check(source)
    assert refused.value.position == (1, column)
    assert refused.value.offset == column - 1
    assert refused.value.message


def test_a_position_counts_lines_and_characters() -> None:
    with pytest.raises(FilterError) as refused:
        check('size > 1 &&\n  "é" == nope')
    assert (refused.value.position, refused.value.offset) == ((2, 10), 21)


@pytest.mark.parametrize(
    "bomb",
    [
        "(" * 4000, "(" * 3000 + "1" + ")" * 3000, "[" * 4000 + "]" * 4000, "1" + "+1" * 4000,
        "true" + "==true" * 1300, "headers" + ".a" * 4000, "dyn(" * 40 + "1" + ")" * 40 + "+" * 99,
        "true ? 1 : " * 700 + "1", "x" * (SOURCE_BYTES_MAX + 1), "\ud800", "", "  ", '"' * 999,
        "size == 1" + " + headers.a" * 17, "size" + "[0]" * 2000, "! - " * 2000 + "1",
    ],
)  # fmt: skip
def test_a_bomb_is_refused_on_a_thread_of_small_stack(bomb: str) -> None:
    refused: list[FilterError] = []

    def run() -> None:
        try:
            check(bomb)
        except FilterError as error:
            refused.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(refused) == 1


def test_hundreds_of_alternatives_are_fine() -> None:
    source = " || ".join(f'headers.a == "{n}"' for n in range(350)) + ' || headers.a == "b"'
    assert Filter(source).matches(MESSAGE)


@given(st.one_of(st.text(max_size=40), PIECES, FILTERS))
@settings(max_examples=examples(400), deadline=None)
def test_any_text_is_checked_or_refused_and_what_is_checked_never_raises(source: str) -> None:
    for want in ("bool", "int"):
        try:
            check(source, want)
        except FilterError:
            continue
        if want == "bool":
            assert Filter(source).matches(MESSAGE) in (True, False)
        else:
            value = Priority(source).explain(MESSAGE)[0]
            assert value is None or 0 <= value <= 255


@given(FILTERS, st.dictionaries(NAMES, NAMES))
@settings(max_examples=examples(600), deadline=None)
def test_a_filter_matches_only_where_its_condition_holds(
    source: str, headers: dict[str, str]
) -> None:
    made = Filter(source)
    condition = made.checked.equalities
    holds = condition is None or any(pairs <= headers.items() for pairs in condition)
    matched = made.matches(context(Facts(headers, 0, 0, 5)))
    assert holds or not matched
    if is_exact(parse(source)) and condition is not None:
        assert matched == holds


@given(FILTERS, st.dictionaries(NAMES, NAMES))
@settings(max_examples=examples(600), deadline=None)
def test_what_is_reported_without_the_library_is_what_it_shows(
    source: str, headers: dict[str, str]
) -> None:
    made = Filter(source)
    tests = [part.test for part in made.checked.parts]
    items = [test(headers) for test in tests if test is not None]
    matched = made.matches(context(Facts(headers, 0, 0, 5)))
    if matched or len(items) == len(tests):
        assert all(items) == matched


@pytest.mark.parametrize(
    "source",
    [
        'headers.t == "a" && headers.kind != "none"', '!has(headers.t) || headers.t != "x"',
        'headers.t in ["a", "b"] ? !("k" in headers) : true', '"a" != headers["t"]',
    ],
)  # fmt: skip
def test_a_comparison_with_texts_needs_no_library(source: str) -> None:
    assert all(part.test is not None for part in Filter(source).checked.parts)


@given(st.lists(FILTERS, max_size=5), st.dictionaries(NAMES, NAMES))
@settings(max_examples=examples(200), deadline=None)
def test_routing_by_the_index_equals_judging_every_filter(
    sources: list[str], headers: dict[str, str]
) -> None:
    rules = RuleSet()
    for number, source in enumerate(sources):
        rules.replace(f"q{number}", source)
    message = context(Facts(headers, 0, 0, 5))
    expected = [f"q{n}" for n, s in enumerate(sources) if Filter(s).matches(message)]
    assert [queue for queue, _ in rules.route(headers, FIELDS, -1, 5)] == expected
    explain = rules.explain(Facts(headers, size=5))
    assert [one.queue_id for one in explain if one.matched] == expected
    assert len(explain) == len(sources)


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("int(headers.n)", 6), ("-size", 0), ("size * 100", 255), ('headers.a == "b" ? 0 : 5', 0),
        ("int(headers.zz)", None), ("int(headers.a)", None), ("size / 0", None),
        ("dyn(true)", None), ("dyn(1.5)", None),
    ],
)  # fmt: skip
def test_a_priority_is_an_int_clamped_or_none(source: str, value: int | None) -> None:
    assert Priority(source).explain(MESSAGE)[0] == value


def test_a_missing_header_is_no_match_and_explained() -> None:
    outcome = Filter('headers.zz == "b"').explain(MESSAGE)
    assert (outcome.matched, "zz" in outcome.error) == (False, True)


def test_a_priority_that_fails_falls_back_and_none_means_128() -> None:
    rules = RuleSet()
    rules.replace("b", "true", "int(headers.zz)", 9)
    rules.replace("a", DEFAULT_FILTER("x"))
    rules.replace("c", "created_at < received_at", "created_at.getHours() + 3")
    assert rules.route({"queue": "x"}, (0, 0, 1, 0, 0), -1, 0) == [("a", 128), ("b", 9), ("c", 3)]
    rules.remove("b")
    assert rules.route({}, FIELDS, -1, 0) == []


@pytest.mark.parametrize(
    ("source", "priority", "said"),
    [
        ("int(headers.zz)", 9, "no such key"),
        ("int(headers.word)", 9, "could not be evaluated"),
        ("dyn(headers.word)", 9, "gave str, not an integer"),
        ("[1.5, 'a'][0]", 9, "gave float, not an integer"),
        ("1 / (size - 5)", 9, "could not be evaluated"),
        ("size * 100", 255, "clamped from 500"),
        ("0 - size", 0, "clamped from -5"),
        ("int(headers.number)", 7, "by the priority"),
    ],
)
def test_a_priority_falls_back_or_is_clamped_and_explained(
    source: str, priority: int, said: str
) -> None:
    rules = RuleSet()
    rules.replace("q", "true", source, 9)
    headers = {"word": "high", "number": "7"}

    assert rules.route(headers, FIELDS, -1, 5) == [("q", priority)]
    [outcome] = rules.explain(Facts(headers, size=5))

    assert outcome.priority == priority
    assert said in outcome.reason
    fell_back = priority == 9
    assert rules.fallbacks == ["q"] * fell_back
    assert ("the fallback 9 holds" in outcome.reason) == fell_back


def test_a_priority_alone_asks_no_filter() -> None:
    rules = RuleSet()
    rules.replace("q", "false", "size + 1", 9)
    rules.replace("plain", "false")

    assert rules.priority("q", {}, FIELDS, -1, 5) == 6
    assert rules.priority("plain", {}, FIELDS, -1, 5) == 128
    with pytest.raises(KeyError):
        rules.priority("nowhere", {}, FIELDS, -1, 5)


def test_a_refused_replacement_leaves_the_rule_before() -> None:
    rules = RuleSet()
    rules.replace("a", "true")
    with pytest.raises(FilterError):
        rules.replace("a", "false", "nope")
    assert rules.route({}, FIELDS, -1, 0) == [("a", 128)]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_the_default_filter_takes_exactly_its_queue(queue_id: str) -> None:
    made = Filter(DEFAULT_FILTER(queue_id))
    assert made.matches(context(Facts({"queue": queue_id}, 0, 0, 0)))
    assert not made.matches(context(Facts({"queue": queue_id + "x"}, 0, 0, 0)))
    assert is_exact(parse(made.checked.source))


def test_the_index_forgets_what_is_removed() -> None:
    index = FilterIndex()
    index.add("a", check('headers.k == "1" || headers.k == "2"').equalities)
    index.add("b", None)
    assert index.candidates({"k": "2"}) == {"a", "b"}
    index.add("a", check('headers.k == "3"').equalities)
    index.remove("b")
    assert index.candidates({"k": "2"}) == set()
    assert index.candidates({"k": "3"}) == {"a"}


def test_times_beyond_what_a_date_holds_are_clamped() -> None:
    late = context(Facts({}, 2**62, -(2**62), 0))
    assert Filter("created_at > received_at").matches(late)


SAMPLES = {
    "string": 'headers["n"]', "int": "size", "uint": "2u", "double": "1.5", "bytes": 'b"a"',
    "timestamp": "created_at", "duration": 'duration("1h")', "list": "[1]", "map": "headers",
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in FUNCTIONS for k in FUNCTIONS[n]])
def test_every_function_listed_is_supported_by_the_library(name: str, kind: str) -> None:
    argument = "created_at" if (name, kind) == ("timestamp", "string") else SAMPLES[kind]
    argument = (
        {"timestamp": "string(created_at)", "duration": '"1h"'}.get(name, argument)
        if (kind == "string")
        else argument
    )
    call = f"type({name}({argument}))"
    outcome = Filter(f"{call} == {call}").explain(MESSAGE)
    assert (outcome.matched, outcome.error) == (True, "")


@pytest.mark.parametrize(("name", "kind"), [(n, k) for n in METHODS for k in sorted(METHODS[n][0])])
def test_every_method_listed_is_supported_by_the_library(name: str, kind: str) -> None:
    argument = '"a"' if METHODS[name][1] else ""
    call = f"({SAMPLES[kind]}).{name}({argument})"
    assert Filter(f"{call} == {call}").explain(MESSAGE).error == ""


def test_a_single_equals_sign_is_answered_with_how_to_compare() -> None:
    with pytest.raises(FilterError, match="to compare, write =="):
        parse('headers.region = "eu"')
    with pytest.raises(FilterError) as refused:
        parse('headers.region === "eu"')
    assert "to compare" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("headers.region ==", "the expression ends too early"),
        ("(headers.region", "missing ')' at the end"),
        ("headers.region == )", "unexpected ')'"),
        ("headers.a # b", "unexpected '#'"),
    ],
)
def test_what_breaks_the_syntax_is_said_in_words(source: str, words: str) -> None:
    with pytest.raises(FilterError) as refused:
        parse(source)

    assert str(refused.value).endswith(f": {words}")


def test_messages_that_share_their_headers_are_routed_by_the_rules_of_the_moment() -> None:
    rules, headers = RuleSet(), {"kind": "a"}
    rules.replace("a", 'headers["kind"] == "a"')
    assert (
        rules.route(headers, FIELDS, -1, 1) == rules.route(headers, FIELDS, -1, 1) == [("a", 128)]
    )

    rules.replace("big", 'headers["kind"] == "a" && size > 5')
    assert rules.route(headers, FIELDS, -1, 1) == [("a", 128)]
    assert rules.route(headers, FIELDS, -1, 9) == [("a", 128), ("big", 128)]

    rules.remove("big")
    assert rules.route(headers, FIELDS, -1, 9) == [("a", 128)]
    rules.remove("a")
    assert rules.route(headers, FIELDS, -1, 9) == []
