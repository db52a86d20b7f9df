"""CEL over message metadata: check, compile, evaluate, and index filters and priorities.

In reading order; a file imports only files above it:

`allowance`   How much processor time the expressions of one queue may take
`engine`      The evaluating library, without its command line
`syntax`      The small tree that an expression becomes, and what is wrong with one that does not
`conditions`  Header pairs without which a filter cannot match, for an inverted index
`plain`       Filters that only compare headers with texts, as Python functions
`signatures`  The functions and operators of the evaluating library, with their types
`typecheck`   Type check of a tree, and bounds on its cost; what is not provable is `dyn`
`parser`      From CEL source to the tree, by the grammar of cel-python
`expressions` Filters and priorities: checked and compiled once, evaluated for every message
`index`       The queues of a message, at a cost that hardly grows with the number of queues
"""

from __future__ import annotations

from libs.filters.allowance import Allowance, TooSlow
from libs.filters.conditions import Condition, values_of
from libs.filters.expressions import (
    DEFAULT_FILTER,
    PRIORITY_MAX,
    Checked,
    Facts,
    Filter,
    Outcome,
    Priority,
    check,
    context,
    load_parser,
    timestamp,
)
from libs.filters.index import (
    DEFAULT_PRIORITY,
    FilterIndex,
    OutOfTime,
    QueueOutcome,
    Rest,
    RuleSet,
    explain_draft,
    facts,
)
from libs.filters.signatures import CONTENT_VARIABLES, VARIABLES
from libs.filters.syntax import SOURCE_BYTES_MAX, FilterError

__all__ = [
    "CONTENT_VARIABLES",
    "DEFAULT_FILTER",
    "DEFAULT_PRIORITY",
    "PRIORITY_MAX",
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
    "context",
    "explain_draft",
    "facts",
    "load_parser",
    "timestamp",
    "values_of",
]
