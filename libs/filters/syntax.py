"""From CEL source to a small tree, by a grammar of ours; never evaluated.

The evaluating library has its own parser and shows no tree. Both must accept an expression, and
where the same text could be read differently (raw strings with a backslash before a quote) it is
refused. Literals are read by the evaluating library itself, so that there is one opinion on escapes
and ranges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from libs.filters.engine import cel
from libs.filters.errors import FilterError

__all__ = ["SOURCE_BYTES_MAX", "Node", "parse"]

SOURCE_BYTES_MAX = 8_192
"""Longest expression: room for hundreds of alternatives, far below the 65,535 bytes of a Utf8."""

BRACKETS_DEPTH_MAX = 48
"""Deepest brackets; the evaluating library's parser gives up at about 96."""

TREE_DEPTH_MAX = 100
"""Deepest tree of ours (chains of || and && count once), far from Python's limit of recursion."""

_STRING = re.compile(
    r"""(?<![A-Za-z0-9_])(?P<prefix>[rRbB]{0,2})(?P<quote>\"{3}|'{3}|"|')|//[^\n]*|(?P<bracket>[()\[\]{}])"""
)
_CEL_POSITION = re.compile(r"<input>:(\d+):(\d+): (.*)")
_SINGLE_EQUALS = re.compile(r"(?<![=!<>])=(?!=)")

_SPACE = re.compile(r"(?:[\t\n\f\r ]|//[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(
    r"(?P<double>-?(?:[0-9]+\.[0-9]*|[0-9]*\.[0-9]+)(?:[eE][+-]?[0-9]+)?|-?[0-9]+[eE][+-]?[0-9]+)"
    r"|-?(?:0x[0-9a-fA-F]+|[0-9]+)(?P<uint>[uU])?"
)
_PREFIXED = re.compile(r"""(?P<bytes>[bB])?[rR]?(?:(?P<lines>"{3}|'{3})|["'])""")
_SIGN = re.compile(r"in(?![A-Za-z0-9_])|\|\||&&|[<>=!]=|[-<>+*/%?:,.()\[\]{}]")
"""What may follow an operand; `in` is a word only where an operand begins."""

_WORDS: Final = {"true": True, "false": False, "null": None}
_LEVELS: Final[Mapping[str, int]] = {
    "||": 0,
    "&&": 1,
    "<": 2, "<=": 2, ">": 2, ">=": 2, "==": 2, "!=": 2, "in": 2,
    "+": 3, "-": 3,
    "*": 4, "/": 4, "%": 4,
}  # fmt: skip
"""How tightly an operator binds; those of a level are read from the left."""

_CHAINS: Final = {"||": "or", "&&": "and"}


@dataclass(frozen=True, slots=True)
class Node:
    """One place of the tree.

    `kind` is literal, ident, select, index, call, method, list, map, unary, binary, or, and, cond.
    `name` is the variable, field, function, operator, or the literal's type; `value` the literal's
    value. `parts` are the operands: a method's first is its target, a map's are key, value, key, …
    `height` is how deep the tree below is.
    """

    kind: str
    name: str
    position: tuple[int, int]
    offset: int
    parts: tuple[Node, ...] = ()
    value: Any = None
    height: int = 0

    def error(self, message: str) -> FilterError:
        """The error that points here."""
        return FilterError(message, self.position, self.offset)


def parse(source: str) -> Node:
    """The tree of `source`; raises FilterError for what either grammar or a limit refuses."""
    try:
        size_bytes = len(source.encode())
    except UnicodeEncodeError as error:
        raise _at(source, error.start, "not valid Unicode text") from None
    if size_bytes > SOURCE_BYTES_MAX:
        raise FilterError(f"{size_bytes} bytes long; at most {SOURCE_BYTES_MAX} are allowed")
    if not source.strip():
        raise FilterError("the expression is empty")
    strings = _scan(source)
    _evaluator_accepts(source)
    return _Reader(source, strings).whole()


def _at(source: str, offset: int, message: str) -> FilterError:
    return FilterError(message, _place(source, offset), offset)


def _place(source: str, offset: int) -> tuple[int, int]:
    """Line and column, both from 1."""
    return source.count("\n", 0, offset) + 1, offset - source.rfind("\n", 0, offset)


def _offset(source: str, line: int, column: int) -> int:
    lines = source.split("\n")
    before = sum(len(text) + 1 for text in lines[: line - 1])
    return min(before + column - 1, len(source))


def _scan(source: str) -> dict[int, int]:
    """The end of each string by its start; raises for one without, and for brackets too deep."""
    ends: dict[int, int] = {}
    depth = at = 0
    while found := _STRING.search(source, at):
        at = found.end()
        if bracket := found["bracket"]:
            depth += 1 if bracket in "([{" else -1
            if depth > BRACKETS_DEPTH_MAX:
                raise _at(source, found.start(), f"brackets deeper than {BRACKETS_DEPTH_MAX}")
        elif quote := found["quote"]:
            at = _string_end(source, found.start(), at, quote, raw="r" in found["prefix"].lower())
            ends[found.start()] = at
    return ends


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
    raise _at(source, start, "a string without its end")


def _evaluator_accepts(source: str) -> None:
    try:
        cel.compile(source)
    except ValueError as error:
        found = _CEL_POSITION.search(str(error))
        if found is None:
            raise FilterError("syntax error") from None
        line, column = max(int(found[1]), 1), max(int(found[2]), 1)
        message = found[3].split(" expecting ")[0].strip() or "syntax error"
        offset = _offset(source, line, column)
        if _SINGLE_EQUALS.match(source, offset):
            message += "; to compare, write =="
        raise FilterError(message, (line, column), offset) from None


class _Reader:
    """Reads an expression from its start to its end, once."""

    def __init__(self, source: str, strings: Mapping[int, int]) -> None:
        """`strings` is the end of each string by its start."""
        self._source, self._strings = source, strings
        self._at = 0
        self._sign = ""
        """What stands here, where an operand has just ended."""

    def whole(self) -> Node:
        """The tree of all that there is."""
        self._move(0)
        node = self._expression()
        if self._at < len(self._source):
            raise self._wrong()
        return node

    def _expression(self) -> Node:
        """Each `a ? b : c` may have another one for `c`."""
        places, tests, results = [self._at], [self._operations()], []
        while self._sign == "?":
            self._take("?")
            results.append(self._operations())
            self._take(":")
            places.append(self._at)
            tests.append(self._operations())
        places.pop()
        node = tests.pop()
        while tests:
            parts = (tests.pop(), results.pop(), node)
            node = self._node("cond", "?:", places.pop(), parts)
        return node

    def _operations(self) -> Node:
        """Operands and what joins them, without recursion: a stack of each."""
        places, operands, signs = [self._at], [self._operand()], list[str]()
        while (sign := self._sign) in _LEVELS:
            while signs and _binds_first(signs[-1], sign):
                self._join(places, operands, signs)
            self._take(sign)
            signs.append(sign)
            places.append(self._at)
            operands.append(self._operand())
        while signs:
            self._join(places, operands, signs)
        return operands[0]

    def _join(self, places: list[int], operands: list[Node], signs: list[str]) -> None:
        """Make one operand of those that the last sign joins; a chain of && or || is one."""
        sign, count = signs.pop(), 2
        while sign in _CHAINS and signs and signs[-1] == sign:
            signs.pop()
            count += 1
        parts = tuple(operands[-count:])
        del operands[-count:], places[len(places) - count + 1 :]
        operands.append(self._node(_CHAINS.get(sign, "binary"), sign, places[-1], parts))

    def _operand(self) -> Node:
        signs: list[int] = []
        while self._source.startswith(("!", "-"), self._at) and not self._number():
            signs.append(self._at)
            self._move(self._at + 1)
        start = self._at
        node = self._primary()
        while self._sign in (".", "[", "{"):
            node = self._member(node, start)
        while signs:
            place = signs.pop()
            node = self._node("unary", self._source[place], place, (node,))
        return node

    def _member(self, target: Node, start: int) -> Node:
        if self._sign == "{":
            raise _at(self._source, start, "building a message {…} is not supported")
        if self._sign == "[":
            self._take("[")
            index = self._expression()
            self._close("]")
            return self._node("index", "[]", start, (target, index))
        self._take(".")
        found = _NAME.match(self._source, self._at)
        if found is None or found[0] in ("true", "false"):
            raise self._wrong()
        self._end(found.end())
        if self._sign == "(":
            return self._node("method", found[0], start, (target, *self._list(")")))
        return self._node("select", found[0], start, (target,))

    def _primary(self) -> Node:
        start = self._at
        if start in self._strings:
            return self._string(start)
        if number := self._number():
            kind = "double" if number["double"] else "uint" if number["uint"] else "int"
            return self._literal(kind, start, number.end())
        if found := _NAME.match(self._source, start):
            return self._named(found[0], start)
        self._sign = self._source[start : start + 1]
        if self._sign == "(":
            self._take("(")
            node = self._expression()
            self._close(")")
            return node
        if self._sign == "[":
            return self._node("list", "list_lit", start, self._list("]"))
        if self._sign == "{":
            return self._node("map", "map_lit", start, self._list("}"))
        if self._sign == ".":
            raise _at(self._source, start, "a leading dot is not supported")
        raise self._wrong()

    def _named(self, name: str, start: int) -> Node:
        self._end(start + len(name))
        if name in _WORDS:
            kind = "null" if name == "null" else "bool"
            return self._node("literal", kind, start, value=_WORDS[name])
        if self._sign == "(":
            return self._node("call", name, start, self._list(")"))
        return self._node("ident", name, start)

    def _list(self, closing: str) -> tuple[Node, ...]:
        """What stands between the bracket here and that one; of a map, keys and values in turn."""
        self._take(self._sign)
        parts: list[Node] = []
        if self._source.startswith(closing, self._at):
            self._end(self._at + 1)
            return ()
        while True:
            parts.append(self._expression())
            if closing == "}":
                self._take(":")
                parts.append(self._expression())
            if self._sign != ",":
                self._close(closing)
                return tuple(parts)
            self._take(",")

    def _number(self) -> re.Match[str] | None:
        return _NUMBER.match(self._source, self._at)

    def _string(self, start: int) -> Node:
        end = self._strings[start]
        found = _PREFIXED.match(self._source, start)
        if found is None or (found["lines"] is None and "\n" in self._source[start:end]):
            raise self._wrong()
        return self._literal("bytes" if found["bytes"] else "string", start, end)

    def _literal(self, kind: str, start: int, end: int) -> Node:
        try:
            value = cel.evaluate(self._source[start:end])
        except (ValueError, RuntimeError, TypeError, ArithmeticError):
            raise _at(self._source, start, f"not a {kind} literal") from None
        self._end(end)
        return self._node("literal", kind, start, value=value)

    def _node(
        self, kind: str, name: str, start: int, parts: tuple[Node, ...] = (), value: Any = None
    ) -> Node:
        height = 1 + max([part.height for part in parts], default=-1)
        if height > TREE_DEPTH_MAX:
            raise FilterError(f"nested or chained more than {TREE_DEPTH_MAX} deep")
        return Node(kind, name, _place(self._source, start), start, parts, value, height)

    def _move(self, at: int) -> None:
        """Go on at the next that is not space."""
        found = _SPACE.match(self._source, at)
        self._at = found.end() if found else at

    def _end(self, at: int) -> None:
        """An operand ends here: see what follows."""
        self._move(at)
        found = _SIGN.match(self._source, self._at)
        self._sign = found[0] if found else ""

    def _take(self, sign: str) -> None:
        """Go over this sign, which must follow, to an operand."""
        if self._sign != sign:
            raise self._wrong()
        self._move(self._at + len(sign))
        self._sign = ""

    def _close(self, bracket: str) -> None:
        """Go over this bracket, which must follow, and which ends an operand."""
        self._take(bracket)
        self._end(self._at)

    def _wrong(self) -> FilterError:
        return _at(self._source, self._at, "syntax error")


def _binds_first(before: str, sign: str) -> bool:
    """Whether the sign before joins its operands before this one does."""
    return _LEVELS[before] > _LEVELS[sign] or (
        _LEVELS[before] == _LEVELS[sign] and sign not in _CHAINS
    )
