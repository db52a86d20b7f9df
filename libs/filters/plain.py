"""Filters that only compare headers with texts, as most do, as Python functions.

The library needs a context for each message and a program for each queue: that was two thirds of
the cost of routing a message, and ten thousand programs do not fit into a cache.

CEL has three outcomes: true, false and an error (a missing header). `&&` and `||` ignore an error
where another operand decides, and an error of the whole does not match. So each part has two tests,
one for true and one for false; where neither holds, it is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from libs.filters.conditions import compared, is_exact, necessary, presence
from libs.filters.syntax import Node

Test: TypeAlias = Callable[[Mapping[str, str]], bool]
"""Whether a part has an outcome for these headers."""

LEAVES_KEPT: Final = 4_096
"""Tests that queues share, if they have them one after the other."""


class Operand(NamedTuple):
    """An operand of a filter's `&&`; without one, the whole filter.

    Attributes:
        test: Whether it is true; None: only the library can evaluate it.
        pairs: Header pairs, if it is true exactly for headers with one of them.
    """

    test: Test | None
    pairs: frozenset[tuple[str, str]] | None


class _Outcomes(NamedTuple):
    true: Test
    false: Test


def parts_of(node: Node) -> tuple[Operand, ...]:
    nodes = node.parts if node.kind == "and" else (node,)
    return tuple(_part(one) for one in nodes)


def _part(node: Node) -> Operand:
    outcomes = _outcomes(node)
    condition = necessary(node) if is_exact(node) else None
    pairs = None if condition is None else frozenset[tuple[str, str]]().union(*condition)
    return Operand(outcomes and outcomes.true, pairs)


def _outcomes(node: Node) -> _Outcomes | None:
    if node.kind == "literal" and isinstance(node.value, bool):
        return _Outcomes(_always, _never) if node.value else _Outcomes(_never, _always)
    if node.kind in ("and", "or", "cond") or (node.kind == "unary" and node.name == "!"):
        found = [_outcomes(part) for part in node.parts]
        parts = [one for one in found if one is not None]
        return _joined(node.kind, parts) if len(parts) == len(found) else None
    return _leaf(node)


def _joined(kind: str, parts: Sequence[_Outcomes]) -> _Outcomes:
    true, false = [one.true for one in parts], [one.false for one in parts]
    if kind == "and":
        return _Outcomes(_all(true), _any(false))
    if kind == "or":
        return _Outcomes(_any(true), _all(false))
    if kind == "unary":
        return _Outcomes(false[0], true[0])
    test, yes, no = parts
    return _Outcomes(
        _any([_all([test.true, yes.true]), _all([test.false, no.true])]),
        _any([_all([test.true, yes.false]), _all([test.false, no.false])]),
    )


def _leaf(node: Node) -> _Outcomes | None:
    key = presence(node)
    if key is not None:
        return _Outcomes(_is_other(key, frozenset()), _is_absent(key))
    found = compared(node)
    if found is None:
        return None
    key, values = found
    is_one, is_other = _is_one_of(key, values), _is_other(key, values)
    return _Outcomes(is_other, is_one) if node.name == "!=" else _Outcomes(is_one, is_other)


def _always(headers: Mapping[str, str]) -> bool:
    return True


def _never(headers: Mapping[str, str]) -> bool:
    return False


def _all(tests: Sequence[Test]) -> Test:
    def holds(headers: Mapping[str, str]) -> bool:
        for test in tests:  # noqa: SIM110 - a generator takes three times as long
            if not test(headers):
                return False
        return True

    return holds


def _any(tests: Sequence[Test]) -> Test:
    def holds(headers: Mapping[str, str]) -> bool:
        for test in tests:  # noqa: SIM110 - as above
            if test(headers):
                return True
        return False

    return holds


# Ten thousand queues may share a test, beside another one in which they differ.


@lru_cache(LEAVES_KEPT)
def _is_one_of(key: str, values: frozenset[str]) -> Test:
    def holds(headers: Mapping[str, str]) -> bool:
        return headers.get(key) in values

    return holds


@lru_cache(LEAVES_KEPT)
def _is_other(key: str, values: frozenset[str]) -> Test:
    def holds(headers: Mapping[str, str]) -> bool:
        return key in headers and headers[key] not in values

    return holds


@lru_cache(LEAVES_KEPT)
def _is_absent(key: str) -> Test:
    def holds(headers: Mapping[str, str]) -> bool:
        return key not in headers

    return holds
