"""Lease tokens in a row: each is the one before it, counted up in its last two characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

LAST: Final = [f"{number:02x}" for number in range(256)]
"""The last two characters of a token, as they are counted up."""

ROW_MIN: Final = 64
"""The shortest row that is worth detecting and sending as one."""


class Row(NamedTuple):
    """Where the first one stands among other tokens, and how many there are."""

    at: int
    size: int


class Rows(NamedTuple):
    """Tokens by whether they are in a row; not every last row is found where there are few."""

    rows: list[Row]
    others: list[int]
    """Where the tokens stand that are in none, in order."""

    def heads(self, tokens: Sequence[str]) -> list[str]:
        """Those that speak for all: the others, then the first one of each row."""
        places = [*self.others, *(row.at for row in self.rows)]
        return list(map(tokens.__getitem__, places))


def rows_among(tokens: Sequence[str]) -> Rows | None:
    """The rows among these tokens; None where none was found."""
    rows: list[Row] = []
    at, step = 0, ROW_MIN
    while len(tokens) - at >= ROW_MIN:
        size = _row_at(tokens, at)
        if size:
            rows.append(Row(at, size))
            at, step = at + size, ROW_MIN
        else:
            # Where nothing is in a row, that must be found out soon.
            at, step = at + step, step * 2
    if not rows:
        return None
    others, end = list[int](), 0
    for row in rows:
        others += range(end, row.at)
        end = row.at + row.size
    others += range(end, len(tokens))
    return Rows(rows, others)


def _row_at(tokens: Sequence[str], at: int) -> int:
    """How many are in a row from here on; 0 where they are too few."""
    if not isinstance(tokens[at], str):
        return 0
    prefix, first = tokens[at][:-2], _PLACES.get(tokens[at][-2:], len(LAST))
    most = min(len(tokens) - at, len(LAST) - first)
    least = ROW_MIN
    if most < least or tokens[at + least - 1] != prefix + LAST[first + least - 1]:
        return 0
    middle = most
    while least < most:
        if tokens[at + middle - 1] == prefix + LAST[first + middle - 1]:
            least = middle
        else:
            most = middle - 1
        middle = (least + most + 1) // 2
    # A few were looked at; now all. Two lists of as many texts, none of this one with a line break:
    # if they are joined to the same, they are the same.
    counted = prefix + f"\n{prefix}".join(LAST[first : first + most])
    try:
        given = "\n".join(tokens[at : at + most])
    except TypeError:
        return 0
    return most if given == counted and "\n" not in prefix else 0


_PLACES: Final = {last: place for place, last in enumerate(LAST)}
