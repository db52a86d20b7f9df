"""From CEL source to a small tree, by the grammar of cel-python.

The evaluating library has its own parser, which returns no tree. Both must accept an expression,
and one that they could read differently (raw strings with a backslash before a quote) is refused.
The evaluating library reads the literals, so that there is one reading of escapes and ranges.
"""

from __future__ import annotations

import re
from typing import Any

from celpy.celparser import CELParseError, CELParser
from lark import Token, Tree

from libs.filters.engine import cel
from libs.filters.syntax import SOURCE_BYTES_MAX, FilterError, Node

BRACKETS_DEPTH_MAX = 48
"""The deepest brackets; the evaluating library's parser fails at about 96."""

TREE_DEPTH_MAX = 100
"""The deepest tree (chains of || and && count once), far from Python's recursion limit."""

_STRING = re.compile(
    r"""(?<![A-Za-z0-9_])(?P<prefix>[rRbB]{0,2})(?P<quote>\"{3}|'{3}|"|')|//[^\n]*|(?P<bracket>[()\[\]{}])"""
)
_CEL_POSITION = re.compile(r"<input>:(\d+):(\d+): (.*)")
_UNEXPECTED = re.compile(
    r"(?:mismatched input|extraneous input|token recognition error at:) '(.*)'"
)
_END = "<EOF>"
"""As the evaluator's parser names the end of an expression."""

_SINGLE_EQUALS = re.compile(r"(?<![=!<>])=(?!=)")
_OPERATORS = {
    "relation_lt": "<", "relation_le": "<=", "relation_gt": ">", "relation_ge": ">=",
    "relation_eq": "==", "relation_ne": "!=", "relation_in": "in", "addition_add": "+",
    "addition_sub": "-", "multiplication_mul": "*", "multiplication_div": "/",
    "multiplication_mod": "%",
}  # fmt: skip
_CHAINS = {"conditionalor": "or", "conditionaland": "and"}
_LITERALS = {
    "INT_LIT": "int", "UINT_LIT": "uint", "FLOAT_LIT": "double", "STRING_LIT": "string",
    "MLSTRING_LIT": "string", "BYTES_LIT": "bytes", "BOOL_LIT": "bool", "NULL_LIT": "null",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None}


class _Parser(CELParser):
    """Keeps the places of `true` and `false`, which the grammar's own rule loses."""

    def __init__(self) -> None:
        CELParser.CEL_PARSER = None  # All share one, perhaps made with the other rule.
        super().__init__()

    @staticmethod
    def ambiguous_literals(t: Token) -> Token:
        return Token.new_borrow_pos("BOOL_LIT", t.value, t) if t in ("true", "false") else t


_PARSER = _Parser()


def parse(source: str) -> Node:
    """The tree of `source`; raises FilterError where a grammar or a limit refuses it."""
    try:
        size_bytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise _at(source, error.start, "not valid Unicode text") from None
    if size_bytes > SOURCE_BYTES_MAX:
        raise FilterError(f"{size_bytes} bytes long; at most {SOURCE_BYTES_MAX} are allowed")
    if not source.strip():
        raise FilterError("the expression is empty")
    spans = _scan(source)
    _evaluator_accepts(source)
    try:
        tree = _PARSER.parse(source)
    except CELParseError as error:
        line, column = error.line or 1, error.column or 1
        if line < 1 or column < 1:
            line, column = 1, 1
        raise FilterError("syntax error", (line, column), _offset(source, line, column)) from None
    _same_strings(source, tree, spans)
    return _node(tree, source, 0)


def _at(source: str, offset: int, message: str) -> FilterError:
    line = source.count("\n", 0, offset) + 1
    return FilterError(message, (line, offset - source.rfind("\n", 0, offset)), offset)


def _offset(source: str, line: int, column: int) -> int:
    lines = source.split("\n")
    before = sum(len(text) + 1 for text in lines[: line - 1])
    return min(before + column - 1, len(source))


def _scan(source: str) -> set[int]:
    """Where strings start; raises for brackets too deep and for unterminated strings."""
    spans: set[int] = set()
    depth = at = 0
    while found := _STRING.search(source, at):
        at = found.end()
        if bracket := found["bracket"]:
            depth += 1 if bracket in "([{" else -1
            if depth > BRACKETS_DEPTH_MAX:
                raise _at(source, found.start(), f"brackets deeper than {BRACKETS_DEPTH_MAX}")
        elif quote := found["quote"]:
            spans.add(found.start())
            at = _string_end(source, found.start(), at, quote, raw="r" in found["prefix"].lower())
    return spans


def _string_end(source: str, start: int, at: int, quote: str, *, raw: bool) -> int:
    while at < len(source):
        if source[at] == "\\":
            if raw and source[at + 1 : at + 2] in ("'", '"'):
                raise _at(source, at, "a raw string with a backslash before a quote is ambiguous")
            at += 1 if raw else 2
        elif source.startswith(quote, at):
            return at + len(quote)
        else:
            at += 1
    raise _at(source, start, "an unterminated string")


def _in_words(problem: str) -> str:
    """What the evaluator's parser says, in words of people."""
    problem = problem.removeprefix("Syntax error: ")
    if found := _UNEXPECTED.fullmatch(problem):
        text = found[1].strip()
        return f"unexpected {text!r}" if text != _END else "the expression ends too early"
    return problem.replace(f"at '{_END}'", "at the end")


def _evaluator_accepts(source: str) -> None:
    try:
        cel.compile(source)
    except ValueError as error:
        found = _CEL_POSITION.search(str(error))
        if found is None:
            raise FilterError("syntax error") from None
        line, column = max(int(found[1]), 1), max(int(found[2]), 1)
        message = _in_words(found[3].split(" expecting ")[0].strip()) or "syntax error"
        offset = _offset(source, line, column)
        if _SINGLE_EQUALS.match(source, offset):
            message += "; to compare, write =="
        raise FilterError(message, (line, column), offset) from None


def _same_strings(source: str, tree: Tree[Token], spans: set[int]) -> None:
    """Raise unless both readers see the same strings; else the trees may differ."""
    seen: set[int] = set()
    parts: list[Tree[Token] | Token] = [tree]
    while parts:
        part = parts.pop()
        if isinstance(part, Tree):
            parts.extend(part.children)
        elif part.type in ("STRING_LIT", "MLSTRING_LIT", "BYTES_LIT"):
            seen.add(part.start_pos or 0)
    if seen != spans:
        raise _at(
            source,
            min(seen ^ spans),
            "this string is ambiguous: write it without escapes",
        )


def _node(tree: Tree[Token] | Token, source: str, depth: int) -> Node:
    """The tree without the grammar's ladder of single children."""
    while isinstance(tree, Tree) and len(tree.children) == 1 and tree.data in _LADDER:
        tree = tree.children[0]
    if depth > TREE_DEPTH_MAX:
        raise FilterError(f"nested or chained more than {TREE_DEPTH_MAX} deep")
    assert isinstance(tree, Tree)
    line, column, at = tree.meta.line, tree.meta.column, tree.meta.start_pos
    place = ((line, column), at)

    def child(part: Tree[Token] | Token) -> Node:
        return _node(part, source, depth + 1)

    children = tree.children
    rule = str(tree.data)
    if rule in _CHAINS:
        return Node(_CHAINS[rule], rule, *place, tuple(child(part) for part in _flat(tree)))
    if rule == "expr":
        return Node("cond", "?:", *place, tuple(child(part) for part in children))
    if rule in ("relation", "addition", "multiplication"):
        operator = children[0]
        assert isinstance(operator, Tree)
        operands = (child(operator.children[0]), child(children[1]))
        return Node("binary", _OPERATORS[str(operator.data)], *place, operands)
    if rule == "unary":
        assert isinstance(children[0], Tree)
        name = "!" if children[0].data == "unary_not" else "-"
        return Node("unary", name, *place, (child(children[1]),))
    if rule == "literal":
        return _literal(children[0], source, place)
    if rule == "ident":
        name = str(children[0])
        if name in _WORDS:
            kind = "null" if name == "null" else "bool"
            return Node("literal", kind, *place, value=_WORDS[name])
        return Node("ident", name, *place)
    if rule == "member_index":
        return Node("index", "[]", *place, (child(children[0]), child(children[1])))
    if rule == "member_dot":
        return Node("select", str(children[1]), *place, (child(children[0]),))
    if rule == "member_dot_arg":
        arguments = tuple(child(part) for part in _list(children[2:]))
        return Node("method", str(children[1]), *place, (child(children[0]), *arguments))
    if rule == "ident_arg":
        return Node("call", str(children[0]), *place, tuple(child(p) for p in _list(children[1:])))
    if rule in ("list_lit", "map_lit"):
        parts = tuple(child(part) for part in _list(children))
        return Node("list" if rule == "list_lit" else "map", rule, *place, parts)
    refused = "a leading dot" if rule.startswith("dot_ident") else "building a message {…}"
    raise FilterError(f"{refused} is not supported", *place)


_LADDER = {
    "expr", "conditionalor", "conditionaland", "relation", "addition", "multiplication",
    "unary", "member", "primary", "paren_expr",
}  # fmt: skip


def _flat(tree: Tree[Token]) -> list[Tree[Token] | Token]:
    """The operands of a chain of one operator, which the grammar nests to the left."""
    rule, parts = tree.data, []
    node: Tree[Token] | Token = tree
    while isinstance(node, Tree) and node.data == rule and len(node.children) == 2:
        parts.append(node.children[1])
        node = node.children[0]
        if isinstance(node, Tree) and node.data == rule and len(node.children) == 1:
            node = node.children[0]
    return [node, *reversed(parts)]


def _list(children: list[Any]) -> list[Any]:
    return list(children[0].children) if children else []


def _literal(token: Any, source: str, place: tuple[tuple[int, int], int]) -> Node:
    kind = _LITERALS[token.type]
    try:
        value = cel.evaluate(str(token))
    except (ValueError, RuntimeError, TypeError, ArithmeticError):
        raise FilterError(f"not a {kind} literal", *place) from None
    return Node("literal", kind, *place, value=value)
