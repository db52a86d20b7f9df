"""Filters, evaluated by cel-python: an error is no match, as docs/reference/filters.md says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import celpy
from celpy import celtypes
from celpy.evaluation import CELEvalError

_ENVIRONMENT = celpy.Environment()


class Filters:
    """Judges headers by expressions; each pair of them once."""

    def __init__(self) -> None:
        self._programs: dict[str, Any] = {}
        self._known: dict[tuple[str, frozenset[tuple[str, str]]], bool] = {}

    def takes(self, expression: str, headers: Mapping[str, str]) -> bool:
        """Whether a filter takes a message with these headers."""
        key = expression, frozenset(headers.items())
        if key not in self._known:
            self._known[key] = self._evaluated(expression, headers)
        return self._known[key]

    def _evaluated(self, expression: str, headers: Mapping[str, str]) -> bool:
        if expression not in self._programs:
            parsed = _ENVIRONMENT.compile(expression)
            self._programs[expression] = _ENVIRONMENT.program(parsed)
        values = celtypes.MapType(
            {celtypes.StringType(k): celtypes.StringType(v) for k, v in headers.items()}
        )
        try:
            return bool(self._programs[expression].evaluate({"headers": values}))
        except CELEvalError:
            return False
