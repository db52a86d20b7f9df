"""CEL over message metadata: check, compile, evaluate, and index filters and priorities.

In reading order; a file imports only files above it:

`allowance`   How much time the expressions of one queue may take from all others
`engine`      The evaluating library, without the command line that comes with it
`errors`      What a bad filter or priority raises
`syntax`      From CEL source to a small tree, by a grammar that shows one (cel-python's); never
              evaluated
`conditions`  What must hold of the headers for a filter to match, in a form an inverted index can
              use
`plain`       Filters said of headers in Python, for what most of them are: comparisons with texts
`signatures`  What the evaluating library supports, found by trying it (tests try each line again)
`typecheck`   Type check of a tree; what is not provable is `dyn` and left to run time
`expressions` Filters and priorities: checked once, compiled once, evaluated for every message
`index`       Which queues a message goes to, at a cost that hardly grows with the number of queues
"""

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
