"""Expressions as cel-python reads them: the grammar that `libs.filters.syntax` is compared with.

It takes a third of a second to load and a millisecond for each expression, and shows a tree.
"""

from __future__ import annotations

from typing import Any

from celpy.celparser import CELParseError, CELParser
from lark import Token, Tree

from libs.filters.engine import cel
from libs.filters.errors import FilterError
from libs.filters.syntax import Node

_OPERATORS = {
    "relation_lt": "<", "relation_le": "<=", "relation_gt": ">", "relation_ge": ">=",
    "relation_eq": "==", "relation_ne": "!=", "relation_in": "in", "addition_add": "+",
    "addition_sub": "-", "multiplication_mul": "*", "multiplication_div": "/",
    "multiplication_mod": "%",
}  # fmt: skip
_CHAINS = {"conditionalor": ("or", "||"), "conditionaland": ("and", "&&")}
_LITERALS = {
    "INT_LIT": "int", "UINT_LIT": "uint", "FLOAT_LIT": "double", "STRING_LIT": "string",
    "MLSTRING_LIT": "string", "BYTES_LIT": "bytes", "BOOL_LIT": "bool", "NULL_LIT": "null",
}  # fmt: skip
_WORDS = {"true": True, "false": False, "null": None}


class _Parser(CELParser):
    """Keeps the place of `true` and `false`, which the grammar's own rule for them loses."""

    @staticmethod
    def ambiguous_literals(t: Token) -> Token:
        return Token.new_borrow_pos("BOOL_LIT", t.value, t) if t in ("true", "false") else t


_PARSER = _Parser()


def parse(source: str) -> Node | None:
    """The tree; None for what the grammar or a literal refuses."""
    try:
        return _node(_PARSER.parse(source), source)
    except (CELParseError, FilterError):
        return None


def _node(tree: Tree[Token] | Token, source: str) -> Node:
    """The tree without the grammar's ladder of single children."""
    while isinstance(tree, Tree) and len(tree.children) == 1 and tree.data in _LADDER:
        tree = tree.children[0]
    assert isinstance(tree, Tree)
    line, column, at = tree.meta.line, tree.meta.column, tree.meta.start_pos
    place = ((line, column), at)

    def child(part: Tree[Token] | Token) -> Node:
        return _node(part, source)

    children = tree.children
    rule = str(tree.data)
    if rule in _CHAINS:
        return Node(*_CHAINS[rule], *place, tuple(child(part) for part in _flat(tree)))
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
