"""CEL over message metadata: check, compile, evaluate, and index filters and priorities."""

from __future__ import annotations

from libs.filters.allowance import Allowance, TooSlow
from libs.filters.conditions import Condition
from libs.filters.errors import FilterError
from libs.filters.expressions import (
    DEFAULT_FILTER,
    Checked,
    Facts,
    Filter,
    Outcome,
    Priority,
    check,
    compile_filter,
    compile_priority,
    context,
    timestamp,
)
from libs.filters.index import (
    DEFAULT_PRIORITY,
    FilterIndex,
    OutOfTime,
    QueueOutcome,
    Rest,
    RuleSet,
    facts,
)
from libs.filters.signatures import CONTENT_VARIABLES, VARIABLES
from libs.filters.syntax import SOURCE_BYTES_MAX

__all__ = [
    "CONTENT_VARIABLES",
    "DEFAULT_FILTER",
    "DEFAULT_PRIORITY",
    "SOURCE_BYTES_MAX",
    "VARIABLES",
    "Allowance",
    "Checked",
    "Condition",
    "Facts",
    "Filter",
    "FilterError",
    "FilterIndex",
    "OutOfTime",
    "Outcome",
    "Priority",
    "QueueOutcome",
    "Rest",
    "RuleSet",
    "TooSlow",
    "check",
    "compile_filter",
    "compile_priority",
    "context",
    "facts",
    "timestamp",
]
