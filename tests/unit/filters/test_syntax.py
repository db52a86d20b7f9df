"""The grammar of ours against cel-python's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from libs.filters.engine import cel
from libs.filters.errors import FilterError
from libs.filters.syntax import Node, parse
from tests.forms import examples
from tests.unit.filters import naive_syntax
from tests.unit.filters.corpus import BAD, GOOD

OPERANDS = st.sampled_from(
    [
        "size", "headers.a", 'headers["a"]', "x", "in", "_b", "true", "null", "f()", "f(1, x)",
        "1", "-1", "0x1F", "2u", "-0x1u", "2.5", ".5", "-1.", "1e3", "1.5E-3",
        '"x"', "''", "r'\\d'", 'b"x"', 'bR"x"', 'rb"x"', '"""a\n"b"""', r'"\x61\""', '"//"',
        "[]", "{}", "[1, 2]", "{'a': 1}", "[1,]", "headers{}", ".a", "headers.true", "// all\n x",
    ]
)  # fmt: skip
SIGNS = st.sampled_from(
    [
        "&&",
        "||",
        "==",
        "!=",
        "<",
        "<=",
        ">",
        ">=",
        " in ",
        "+",
        "-",
        "*",
        "/",
        "%",
        "\n&& ",
        "=",
        "",
    ]
)
EXPRESSIONS = st.recursive(
    OPERANDS,
    lambda inner: st.one_of(
        st.tuples(inner, SIGNS, inner).map("".join),
        st.tuples(st.sampled_from(["!", "-", "- ", "!!"]), inner).map("".join),
        inner.map(lambda one: f"({one})"),
        st.tuples(inner, inner, inner).map(lambda three: "{} ? {} : {}".format(*three)),
        st.tuples(inner, inner).map(lambda two: "{}[{}]".format(*two)),
        st.tuples(inner, inner).map(lambda two: "{}.m( {} )".format(*two)),
        st.tuples(inner, inner).map(lambda two: "[{}, {}].f".format(*two)),
    ),
    max_leaves=8,
)


def read(source: str) -> Node | None:
    try:
        return parse(source)
    except FilterError:
        return None


def evaluates(source: str) -> bool:
    try:
        cel.compile(source)
    except ValueError:
        return False
    return True


def without_heights(node: Node) -> Node:
    parts = tuple(without_heights(part) for part in node.parts)
    return replace(node, parts=parts, height=0)


def same_tree(source: str) -> bool:
    """Whether it is read as cel-python does, every place and value; or refused by one who must."""
    tree = read(source)
    expected = naive_syntax.parse(source)
    if tree is None or expected is None:
        return tree is None and (expected is None or not evaluates(source))
    # Values as text, since 1 equals 1.0 and true.
    return repr(without_heights(tree)) == repr(expected)


@pytest.mark.parametrize("source", GOOD)
def test_what_is_good_is_read_as_the_other_grammar_reads_it(source: str) -> None:
    assert read(source) is not None
    assert same_tree(source)


@given(st.one_of(EXPRESSIONS, st.sampled_from([source for _, source in BAD])))
@settings(max_examples=examples(1_000), deadline=None)
def test_any_expression_is_refused_or_read_as_the_other_grammar_reads_it(source: str) -> None:
    assert same_tree(source)


def test_a_chain_is_one_node_and_brackets_end_it() -> None:
    chain = parse("size == 1 || size == 2 || (size == 3 || size == 4)")

    assert (chain.kind, [part.kind for part in chain.parts]) == ("or", ["binary", "binary", "or"])
    assert parse("size + 1 * 2 - 3").parts[0].parts[1].name == "*"
    assert parse("(size == 1) || true").offset == 0
