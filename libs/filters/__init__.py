"""CEL over message metadata: check, compile, evaluate, and index filters and priorities."""

from __future__ import annotations

from libs.filters.conditions import Condition
from libs.filters.errors import FilterError
from libs.filters.expressions import (
    DEFAULT_FILTER,
    Checked,
    Filter,
    Outcome,
    Priority,
    check,
    compile_filter,
    compile_priority,
    context,
    timestamp,
)
from libs.filters.index import DEFAULT_PRIORITY, FilterIndex, QueueOutcome, RuleSet
from libs.filters.syntax import SOURCE_BYTES_MAX

__all__ = [
    "DEFAULT_FILTER",
    "DEFAULT_PRIORITY",
    "SOURCE_BYTES_MAX",
    "Checked",
    "Condition",
    "Filter",
    "FilterError",
    "FilterIndex",
    "Outcome",
    "Priority",
    "QueueOutcome",
    "RuleSet",
    "check",
    "compile_filter",
    "compile_priority",
    "context",
    "timestamp",
]
