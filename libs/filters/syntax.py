"""The small tree that an expression becomes, and what is wrong with one that does not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SOURCE_BYTES_MAX = 8_192
"""The longest expression: hundreds of alternatives, far below the 65,535 bytes of a Utf8."""


class FilterError(ValueError):
    """The expression is invalid at `position`.

    Attributes:
        message: What is wrong, for people.
        position: Line and column, both from 1, counted in characters.
        offset: The number of characters before that place.
    """

    def __init__(self, message: str, position: tuple[int, int] = (1, 1), offset: int = 0) -> None:
        super().__init__(f"line {position[0]}, column {position[1]}: {message}")
        self.message = message
        self.position = position
        self.offset = offset


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree.

    `kind` is literal, ident, select, index, call, method, list, map, unary, binary, or, and, cond.
    `name` is the variable, field, function, operator, or the literal's type; `value` the literal's
    value. `parts` are the operands: a method's first is its target, a map's are key, value, key, …
    """

    kind: str
    name: str
    position: tuple[int, int]
    offset: int
    parts: tuple[Node, ...] = ()
    value: Any = None

    def error(self, message: str) -> FilterError:
        return FilterError(message, self.position, self.offset)
