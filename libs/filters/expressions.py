"""Filters and priorities: checked and compiled once, evaluated for every message."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from libs.filters.conditions import Condition, keys_read, necessary
from libs.filters.engine import cel
from libs.filters.plain import Operand, parts_of
from libs.filters.signatures import VARIABLES, Type
from libs.filters.syntax import Node
from libs.filters.typecheck import type_of

PRIORITY_MAX = 255
NO_MORE: Final[Mapping[str, Any]] = MappingProxyType({})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS_MIN, _MS_MAX = -62_135_596_800_000, 253_402_300_799_999
_INT_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """A good expression.

    Attributes:
        source: The expression.
        variables: The variables it reads; a context of these alone is cheaper than one of all.
        equalities: A filter's necessary condition; see `libs.filters.conditions`.
        parts: The operands of a filter's `&&`; see `libs.filters.plain`.
        keys: The keys of headers on which it depends; None: any may matter.
        cost: How many steps it may take for one message; see `libs.filters.typecheck`.
    """

    source: str
    variables: frozenset[str]
    equalities: Condition | None
    parts: tuple[Operand, ...]
    keys: frozenset[str] | None
    cost: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether a message matches; `error` is empty unless the evaluation failed."""

    matched: bool
    error: str = ""


class Facts(NamedTuple):
    """A message as expressions see it; times in ms since 1970, and retention 0 means for ever."""

    headers: dict[str, str]
    created_at_ms: int = 0
    received_at_ms: int = 0
    size: int = 0
    visible_at_ms: int = 0
    retention_s: int = 0
    message_id: int = 0


def load_parser() -> Callable[[str], Node]:
    """`libs.filters.parser.parse`; the first call takes a quarter of a second of processor time.

    A process without expressions saves it. One that serves others first calls this as it starts.
    """
    parse: Callable[[str], Node] = import_module("libs.filters.parser").parse
    return parse


def check(
    source: str, want: Literal["bool", "int"] = "bool", variables: Mapping[str, Type] = VARIABLES
) -> Checked:
    """Check a filter ("bool") or priority ("int"); raises FilterError."""
    tree = load_parser()(source)
    try:
        kind, cost = type_of(tree, variables)
    except RecursionError:
        raise tree.error("nested too deep") from None
    if kind not in (want, "dyn"):
        what = "a filter" if want == "bool" else "a priority"
        name = kind if isinstance(kind, str) else kind[0]
        raise tree.error(f"{what} must give {want}, not {name}")
    names = frozenset(_names(tree)) & variables.keys()
    if want == "int":
        return Checked(source, names, None, (), keys_read(tree), cost)
    return Checked(source, names, necessary(tree), parts_of(tree), keys_read(tree), cost)


def _names(node: Node) -> set[str]:
    own = {node.name} if node.kind == "ident" else set()
    return own.union(*(_names(part) for part in node.parts))


def context(
    facts: Facts, wanted: Collection[str] = VARIABLES.keys(), more: Mapping[str, object] = NO_MORE
) -> cel.Context:
    """The variables of one message, on which expressions are evaluated.

    Args:
        facts: The message. Its times are clamped to the years 1 to 9999.
        wanted: The variables to include besides the headers and the size.
        more: The values of further variables.
    """
    variables: dict[str, Any] = {"headers": facts.headers, "size": min(facts.size, _INT_MAX)}
    for name in wanted:
        if name in _VALUES:
            variables[name] = _VALUES[name](facts)
    return cel.Context({**variables, **more})


def timestamp(time_ms: int) -> datetime:
    """A time in ms as a CEL timestamp, clamped to the years 1 to 9999."""
    return _EPOCH + timedelta(milliseconds=min(max(time_ms, _MS_MIN), _MS_MAX))


_VALUES: Final[Mapping[str, Callable[[Facts], object]]] = {
    "created_at": lambda facts: timestamp(facts.created_at_ms),
    "received_at": lambda facts: timestamp(facts.received_at_ms),
    "visible_at": lambda facts: timestamp(facts.visible_at_ms),
    "retention": lambda facts: timedelta(seconds=facts.retention_s),
    "message_id": lambda facts: facts.message_id,
}


def _evaluate(program: cel.Program, message: cel.Context) -> tuple[Any, str]:
    """The value, or None and the error, even where the library panics (not an Exception)."""
    try:
        return program.execute(message), ""
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except KeyError as error:
        return None, f"no such key: {error}"
    except BaseException as error:  # noqa: BLE001 - one bad expression must not stop the router
        return None, " ".join(str(error).split()) or type(error).__name__


class Filter:
    """A compiled filter. Making one raises FilterError."""

    def __init__(self, source: str, variables: Mapping[str, Type] = VARIABLES) -> None:
        self.checked = check(source, "bool", variables)
        self._program = cel.compile(source)

    def matches(self, message: cel.Context) -> bool:
        """Whether it matches; False on an evaluation error."""
        return _evaluate(self._program, message)[0] is True

    def explain(self, message: cel.Context) -> Outcome:
        """Whether it matches, and the error if the evaluation failed."""
        value, error = _evaluate(self._program, message)
        if not error and not isinstance(value, bool):
            error = f"gave {type(value).__name__}, not a boolean"
        return Outcome(value is True, error)


class Priority:
    """A compiled priority. Making one raises FilterError."""

    def __init__(self, source: str) -> None:
        self.checked = check(source, "int")
        self._program = cel.compile(source)

    def explain(self, message: cel.Context) -> tuple[int | None, str]:
        """The priority, clamped to 0..255, and a note: the error, or the value before clamping.

        None on an evaluation error, or for a value that is not an int.
        """
        value, error = _evaluate(self._program, message)
        if error:
            return None, f"could not be evaluated: {error}"
        if isinstance(value, bool) or not isinstance(value, int):
            return None, f"gave {type(value).__name__}, not an integer"
        if 0 <= value <= PRIORITY_MAX:
            return value, ""
        return min(max(value, 0), PRIORITY_MAX), f"clamped from {value}"


def DEFAULT_FILTER(queue_id: str) -> str:  # noqa: N802 - it stands where a constant would
    """The filter of a queue without one: messages with the header `queue` set to its ID."""
    escaped = "".join(
        c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in queue_id
    )
    return f'headers["queue"] == "{escaped}"'
