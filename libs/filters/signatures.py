"""The functions and operators of the evaluating library, with their types. Tests try each.

A type is bool, int, uint, double, string, bytes, timestamp, duration, null, type, dyn (not known
before run time), or list<T>, map<K,V> as tuples.
"""

from __future__ import annotations

from typing import TypeAlias

Type: TypeAlias = str | tuple["Type", ...]

CONTENT_VARIABLES: dict[str, Type] = {
    "headers": ("map", "string", "string"),
    "created_at": "timestamp",
    "received_at": "timestamp",
    "size": "int",
}
"""The variables that follow from the content of a message."""

VARIABLES: dict[str, Type] = {
    **CONTENT_VARIABLES,
    "visible_at": "timestamp",
    "retention": "duration",
    "message_id": "int",
}
"""The variables of a queue's filter and priority."""

TYPE_NAMES = frozenset(
    {"int", "uint", "double", "string", "bytes", "bool", "list", "map", "null_type"}
)
NUMBERS = frozenset({"int", "uint", "double"})
ORDERED = NUMBERS | {"bool", "string", "bytes", "timestamp", "duration"}

FUNCTIONS: dict[str, dict[str, Type]] = {
    "size": dict.fromkeys(("string", "bytes", "list", "map"), "int"),
    "int": dict.fromkeys(("string", "int", "uint", "double"), "int"),
    "uint": dict.fromkeys(("string", "int", "uint", "double"), "uint"),
    "double": dict.fromkeys(("string", "int", "uint", "double"), "double"),
    "string": dict.fromkeys(
        ("string", "int", "uint", "double", "bytes", "timestamp", "duration"), "string"
    ),
    "bytes": dict.fromkeys(("string", "bytes"), "bytes"),
    "timestamp": dict.fromkeys(("string", "timestamp"), "timestamp"),
    "duration": dict.fromkeys(("string", "duration"), "duration"),
}
"""Function → type of its one argument → type of its result. (`type` and `dyn` take anything.)"""

_DURATION_PARTS = ("getHours", "getMinutes", "getSeconds", "getMilliseconds")
_DATE_PARTS = (
    "getFullYear", "getMonth", "getDate", "getDayOfMonth", "getDayOfYear", "getDayOfWeek",
)  # fmt: skip

METHODS: dict[str, tuple[frozenset[str], tuple[Type, ...], Type]] = {
    "size": (frozenset({"string", "bytes", "list", "map"}), (), "int"),
    **dict.fromkeys(
        ("contains", "startsWith", "endsWith", "matches"),
        (frozenset({"string"}), ("string",), "bool"),
    ),
    **dict.fromkeys(_DURATION_PARTS, (frozenset({"timestamp", "duration"}), (), "int")),
    **dict.fromkeys(_DATE_PARTS, (frozenset({"timestamp"}), (), "int")),
}
"""Method → types of its target, types of its arguments, type of its result."""

BINARY: dict[tuple[str, str, str], Type] = {
    **{(op, kind, kind): kind for op in "+-*/" for kind in NUMBERS},
    ("%", "int", "int"): "int",
    ("%", "uint", "uint"): "uint",
    ("+", "string", "string"): "string",
    ("+", "bytes", "bytes"): "bytes",
    ("+", "timestamp", "duration"): "timestamp",
    ("-", "timestamp", "duration"): "timestamp",
    ("-", "timestamp", "timestamp"): "duration",
    ("+", "duration", "duration"): "duration",
    ("-", "duration", "duration"): "duration",
}
