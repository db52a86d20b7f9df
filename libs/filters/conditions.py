"""Header pairs without which a filter cannot match, for an inverted index.

A condition is a set of alternatives, each a set of (key, value) pairs that must all be among the
headers; the filter can only match if one alternative holds. No alternatives: it never matches.
None: nothing is known. Errors need no handling, as an evaluation that fails does not match.
"""

from __future__ import annotations

from typing import TypeAlias

from libs.filters.syntax import Node

Condition: TypeAlias = frozenset[frozenset[tuple[str, str]]]

ALTERNATIVES_MAX = 1_024
"""A condition that would have more is weakened or dropped."""

NEVER: Condition = frozenset()


def necessary(node: Node) -> Condition | None:
    if node.kind == "literal" and node.value is False:
        return NEVER
    if node.kind == "or":
        return _any([necessary(part) for part in node.parts])
    if node.kind == "and":
        return _all([necessary(part) for part in node.parts])
    if node.kind == "cond":
        test, yes, no = (necessary(part) for part in node.parts)
        return _any([_all([test, yes]), no])
    return _leaf(node)


def values_of(condition: Condition | None, key: str) -> frozenset[str] | None:
    """The values of a header with which a filter can match; None: any, or without the header."""
    if condition is None:
        return None
    values = [dict(pairs).get(key) for pairs in condition]
    known = frozenset(value for value in values if value is not None)
    return None if None in values else known


def is_exact(node: Node) -> bool:
    """Whether the condition is sufficient too: only equalities joined by ||."""
    if node.kind == "or":
        return all(is_exact(part) for part in node.parts)
    return _leaf(node) is not None


def _any(conditions: list[Condition | None]) -> Condition | None:
    union: set[frozenset[tuple[str, str]]] = set()
    for condition in conditions:
        if condition is None:
            return None
        union |= condition
    return frozenset(union) if len(union) <= ALTERNATIVES_MAX else None


def _all(conditions: list[Condition | None]) -> Condition | None:
    known = sorted((one for one in conditions if one is not None), key=len)
    if not known:
        return None
    result = known[0]
    for condition in known[1:]:
        if len(result) * len(condition) <= ALTERNATIVES_MAX:
            joined = (one | other for one in result for other in condition)
            result = frozenset(pairs for pairs in joined if len(dict(pairs)) == len(pairs))
    return result


def _leaf(node: Node) -> Condition | None:
    found = None if node.name == "!=" else compared(node)
    if found is None:
        return None
    key, values = found
    return frozenset(frozenset({(key, value)}) for value in values)


def compared(node: Node) -> tuple[str, frozenset[str]] | None:
    """The name of a header and the texts that this compares it with, by ==, != or in."""
    if node.kind != "binary" or node.name not in ("==", "!=", "in"):
        return None
    left, right = node.parts
    if node.name != "in":
        if key_of(left) is None:
            left, right = right, left
        values = [right]
    elif right.kind == "list":
        values = list(right.parts)
    else:
        return None
    key = key_of(left)
    if key is None or not all(one.kind == "literal" and one.name == "string" for one in values):
        return None
    return key, frozenset(one.value for one in values)


def key_of(node: Node, variable: str = "headers") -> str | None:
    """k, if this is headers["k"] or headers.k."""
    if node.kind not in ("select", "index"):
        return None
    target = node.parts[0]
    if target.kind != "ident" or target.name != variable:
        return None
    if node.kind == "select":
        return node.name
    key = node.parts[1]
    return key.value if key.kind == "literal" and key.name == "string" else None


def presence(node: Node) -> str | None:
    """k, if this is "k" in headers or has(headers.k)."""
    if node.kind == "call" and node.name == "has":
        return key_of(node.parts[0])
    if node.kind != "binary" or node.name != "in":
        return None
    left, right = node.parts
    is_headers = right.kind == "ident" and right.name == "headers"
    if not is_headers or left.kind != "literal" or left.name != "string":
        return None
    return str(left.value)


def keys_read(node: Node) -> frozenset[str] | None:
    """The keys of headers on which the outcome depends; None: any may matter."""
    key = key_of(node) or presence(node)
    if key is not None:
        return frozenset((key,))
    if node.kind == "ident" and node.name == "headers":
        return None
    keys: frozenset[str] = frozenset()
    for part in node.parts:
        of_part = keys_read(part)
        if of_part is None:
            return None
        keys |= of_part
    return keys
