"""Filters, evaluated by cel-python: an error is no match, as docs/reference/filters.md says."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import celpy
from celpy import celtypes
from celpy.evaluation import CELEvalError

KNOWN_MAX: Final = 100_000
"""Pairs of a filter and headers whose outcome is kept: some 50 MB where all headers differ."""

_ENVIRONMENT = celpy.Environment()


def takes(expression: str, headers: Mapping[str, str]) -> bool:
    """Whether a filter takes a message with these headers."""
    return _takes(expression, frozenset(headers.items()))


@functools.lru_cache(KNOWN_MAX)
def _takes(expression: str, headers: frozenset[tuple[str, str]]) -> bool:
    values = celtypes.MapType({celtypes.StringType(k): celtypes.StringType(v) for k, v in headers})
    try:
        return bool(_program(expression).evaluate({"headers": values}))
    except CELEvalError:
        return False


@functools.cache
def _program(expression: str) -> Any:
    return _ENVIRONMENT.program(_ENVIRONMENT.compile(expression))
