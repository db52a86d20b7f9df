"""Type check of a tree, and bounds on its cost; what is not provable is `dyn`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from libs.filters.engine import cel
from libs.filters.signatures import (
    BINARY,
    FUNCTIONS,
    METHODS,
    NUMBERS,
    ORDERED,
    TYPE_NAMES,
    Type,
)
from libs.filters.syntax import Node

HEADERS_COUNT_MAX = 255
"""The most headers of a message, and so the most turns of a macro over them."""

STEPS_MAX = 50_000
"""Steps of all macros of an expression together, for one message: about five milliseconds. A part
of the expression counts as a step for each turn of the macros around it."""

CONCATENATIONS_MAX = 16
"""Each may copy a header of 64 KiB, for every message."""

PATTERN_CHARS_MAX = 256
"""The library compiles a pattern at every evaluation."""

PATTERNS_WEIGHT_MAX = 96
"""Of all patterns of an expression together: 20 ms at worst, usually far less."""

PATTERN_STEPS = 1_000
"""What the weight 1 of a pattern costs at worst, in steps."""

CONCATENATION_STEPS = 60
"""What joining texts of 64 KiB costs, in steps."""

_CLASS = re.compile(r"\\[a-zA-Z]|\.")
_COUNT = re.compile(r"\{\s*(?P<least>\d{1,9})\s*(,\s*(?P<most>\d{1,9})?\s*)?\}")
_MACROS = {"all": "bool", "exists": "bool", "exists_one": "bool", "map": "list", "filter": "list"}
_DURATION_MAX = timedelta(seconds=9_223_372_036)


@dataclass(slots=True)
class _Budget:
    steps: int = 0
    concatenations: int = 0
    patterns: int = 0
    literals: int = HEADERS_COUNT_MAX
    cost: int = 0


@dataclass(frozen=True, slots=True)
class _Scope:
    variables: dict[str, Type]
    loops: frozenset[str] = frozenset()
    turns: int = 1
    budget: _Budget = field(default_factory=_Budget)


def type_of(node: Node, variables: Mapping[str, Type]) -> tuple[Type, int]:
    """The type of an expression, and its cost; raises FilterError for what is certainly wrong.

    The cost is how many steps it may take for one message: each part is one, for each turn of the
    macros around it. A step takes about 0.15 µs.
    """
    scope = _Scope(dict(variables))
    scope.budget.literals = max(HEADERS_COUNT_MAX, _widest(node))
    kind = _type(node, scope)
    budget = scope.budget
    extra = budget.patterns * PATTERN_STEPS + budget.concatenations * CONCATENATION_STEPS
    return kind, budget.cost + extra


def _widest(node: Node) -> int:
    own = len(node.parts) if node.kind in ("list", "map") else 0
    return max([own, *(_widest(part) for part in node.parts)])


def _type(node: Node, scope: _Scope) -> Type:
    scope.budget.cost += scope.turns
    if scope.loops:
        scope.budget.steps += scope.turns
        if scope.budget.steps > STEPS_MAX:
            raise node.error(f"macros could take more than {STEPS_MAX} steps for one message")
    return _RULES[node.kind](node, scope)


def _base(kind: Type) -> str:
    return kind if isinstance(kind, str) else str(kind[0])


def _words(kind: Type) -> str:
    if isinstance(kind, str):
        return kind
    return f"{kind[0]}<{', '.join(_words(part) for part in kind[1:])}>"


def _literal(node: Node, scope: _Scope) -> Type:
    return node.name


def _ident(node: Node, scope: _Scope) -> Type:
    if node.name in scope.variables:
        return scope.variables[node.name]
    if node.name in TYPE_NAMES:
        return "type"
    known = ", ".join(name for name in scope.variables if name not in scope.loops)
    raise node.error(f"unknown variable {node.name!r}; there are {known}")


def _select(node: Node, scope: _Scope) -> Type:
    target = _type(node.parts[0], scope)
    if target == "dyn":
        return "dyn"
    if isinstance(target, tuple) and target[0] == "map" and target[1] in ("string", "dyn"):
        return target[2]
    raise node.error(f"{_words(target)} has no field {node.name!r}")


def _index(node: Node, scope: _Scope) -> Type:
    target, key = (_type(part, scope) for part in node.parts)
    if target == "dyn":
        return "dyn"
    if not isinstance(target, tuple):
        raise node.error(f"{_words(target)} cannot be indexed")
    wanted: frozenset[Type] = frozenset(("int", "uint"))
    if target[0] == "map":
        wanted = frozenset((target[1],))
    if key != "dyn" and "dyn" not in wanted and key not in wanted:
        names = " or ".join(sorted(_words(kind) for kind in wanted))
        raise node.parts[1].error(f"{_words(target)} is indexed by {names}, not {_words(key)}")
    return target[-1]


def _list(node: Node, scope: _Scope) -> Type:
    _no_loop_variable(node, scope)
    return ("list", _same([_type(part, scope) for part in node.parts]))


def _map(node: Node, scope: _Scope) -> Type:
    _no_loop_variable(node, scope)
    keys = [_type(part, scope) for part in node.parts[::2]]
    for part, key in zip(node.parts[::2], keys, strict=True):
        if key not in ("int", "uint", "bool", "string", "dyn"):
            raise part.error(f"a map's key cannot be {_words(key)}")
    return ("map", _same(keys), _same([_type(part, scope) for part in node.parts[1::2]]))


def _same(kinds: list[Type]) -> Type:
    return kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else "dyn"


def _no_loop_variable(node: Node, scope: _Scope) -> None:
    if scope.loops and _mentions(node, scope.loops):
        raise node.error("a list or map built from a macro's variable could grow without bound")


def _mentions(node: Node, names: frozenset[str]) -> bool:
    own = node.kind == "ident" and node.name in names
    return own or any(_mentions(part, names) for part in node.parts)


def _bool(node: Node, scope: _Scope, what: str) -> None:
    kind = _type(node, scope)
    if kind not in ("bool", "dyn"):
        raise node.error(f"{what} must be bool, not {_words(kind)}")


def _logic(node: Node, scope: _Scope) -> Type:
    for part in node.parts:
        _bool(part, scope, f"an operand of {'||' if node.kind == 'or' else '&&'}")
    return "bool"


def _unary(node: Node, scope: _Scope) -> Type:
    if node.name == "!":
        _bool(node.parts[0], scope, "the operand of !")
        return "bool"
    kind = _type(node.parts[0], scope)
    if kind not in ("int", "double", "dyn"):
        raise node.error(f"- does not apply to {_words(kind)}")
    return kind


def _cond(node: Node, scope: _Scope) -> Type:
    _bool(node.parts[0], scope, "the condition of ?:")
    yes, no = (_type(part, scope) for part in node.parts[1:])
    if not _comparable(yes, no, loose=False):
        raise node.parts[2].error(f"?: gives {_words(yes)} here and {_words(no)} there")
    return yes if yes == no else "dyn"


def _comparable(left: Type, right: Type, *, loose: bool = True) -> bool:
    if "dyn" in (left, right) or left == right:
        return True
    if isinstance(left, str) or isinstance(right, str):
        if loose and left in NUMBERS and right in NUMBERS:
            return True
        return loose and "null" in (left, right) and _base(left) in ("null", "dyn")
    pairs = zip(left[1:], right[1:], strict=True) if left[0] == right[0] else ()
    return left[0] == right[0] and all(_comparable(a, b, loose=loose) for a, b in pairs)


def _binary(node: Node, scope: _Scope) -> Type:
    left, right = (_type(part, scope) for part in node.parts)
    if node.name == "in":
        return _in(node, left, right)
    wrong = node.error(
        f"{_words(left)} {node.name} {_words(right)} is not possible{_hint(left, right)}"
    )
    if node.name in ("==", "!=", "<", "<=", ">", ">="):
        ordered = node.name in ("==", "!=") or {left, right} <= ORDERED | {"dyn"}
        if not (ordered and _comparable(left, right)):
            raise wrong
        return "bool"
    if node.name == "+":
        _count_concatenation(node, scope, left, right)
        if _base(left) == _base(right) == "list":
            return left if left == right else ("list", "dyn")
    fits = {
        result
        for (name, a, b), result in BINARY.items()
        if name == node.name and left in (a, "dyn") and right in (b, "dyn")
    }
    if not fits and not (node.name == "+" and {_base(left), _base(right)} == {"list", "dyn"}):
        raise wrong
    return fits.pop() if len(fits) == 1 and "dyn" not in (left, right) else "dyn"


def _hint(left: Type, right: Type) -> str:
    """How to make a number of a header, which is most often compared with one."""
    if "string" in (left, right) and {left, right} & NUMBERS:
        return "; headers are strings: int(headers.n) or double(headers.n) makes a number of one"
    return ""


def _count_concatenation(node: Node, scope: _Scope, left: Type, right: Type) -> None:
    grows = {"string", "bytes", "list", "dyn"}
    if _base(left) not in grows or _base(right) not in grows:
        return
    if scope.loops:
        raise node.error("inside a macro + joins numbers and times only, not text or lists")
    scope.budget.concatenations += 1
    if scope.budget.concatenations > CONCATENATIONS_MAX:
        raise node.error(f"more than {CONCATENATIONS_MAX} texts or lists joined by +")


def _in(node: Node, left: Type, right: Type) -> Type:
    if right == "dyn":
        return "bool"
    if not isinstance(right, tuple):
        raise node.parts[1].error(f"in looks into a list or a map, not {_words(right)}")
    if not _comparable(left, right[1]):
        raise node.error(f"{_words(left)} is never in {_words(right)}")
    return "bool"


def _call(node: Node, scope: _Scope) -> Type:
    if node.name == "has":
        if len(node.parts) != 1 or node.parts[0].kind != "select":
            raise node.error("has() takes one field, as in has(headers.tier)")
        _type(node.parts[0], scope)
        return "bool"
    kinds = [_type(part, scope) for part in node.parts]
    if node.name not in FUNCTIONS and node.name not in ("type", "dyn"):
        raise node.error(f"unknown function {node.name!r}")
    if len(kinds) != 1:
        raise node.error(f"{node.name}() takes one argument, not {len(kinds)}")
    if node.name in ("type", "dyn"):
        return node.name
    results = FUNCTIONS[node.name]
    if kinds[0] == "dyn":
        return next(iter(results.values()))
    if _base(kinds[0]) not in results:
        raise node.error(f"{node.name}() does not take {_words(kinds[0])}")
    _try_literal(node)
    return results[_base(kinds[0])]


def _try_literal(node: Node) -> None:
    """Try the conversion of a literal: where it fails now, it always fails."""
    if node.parts[0].kind != "literal":
        return
    try:
        value = cel.evaluate(f"{node.name}(x)", {"x": node.parts[0].value})
    except (ValueError, RuntimeError, TypeError, ArithmeticError) as error:
        reason = str(error).splitlines()[0]
        raise node.error(f"{node.name}() of this literal fails: {reason}") from None
    if isinstance(value, timedelta) and abs(value) >= _DURATION_MAX:
        raise node.error("a duration is at most 2562047 hours: the library would truncate it")


def _method(node: Node, scope: _Scope) -> Type:
    if node.name in _MACROS:
        return _macro(node, scope)
    if node.name not in METHODS:
        raise node.error(f"unknown method {node.name!r}")
    targets, wanted, result = METHODS[node.name]
    target, *arguments = (_type(part, scope) for part in node.parts)
    if target != "dyn" and _base(target) not in targets:
        raise node.error(f"{_words(target)} has no method {node.name!r}")
    if len(arguments) != len(wanted):
        raise node.error(f"{node.name}() takes {len(wanted)} argument(s), not {len(arguments)}")
    for part, kind, want in zip(node.parts[1:], arguments, wanted, strict=True):
        if kind not in (want, "dyn"):
            raise part.error(f"{node.name}() takes {_words(want)}, not {_words(kind)}")
    if node.name == "matches":
        _pattern(node.parts[1], scope)
    return result


def _pattern(node: Node, scope: _Scope) -> None:
    if node.kind != "literal":
        raise node.error("a pattern must be a literal: it is checked when the queue is created")
    if len(node.value) > PATTERN_CHARS_MAX:
        raise node.error(f"a pattern has at most {PATTERN_CHARS_MAX} characters")
    if scope.loops:
        raise node.error("matches() cannot be used inside a macro: it is costly at every turn")
    scope.budget.patterns += _weight(node.value)
    if scope.budget.patterns > PATTERNS_WEIGHT_MAX:
        raise node.error("patterns too costly: fewer classes, or fewer repeats by {…}")
    try:
        cel.evaluate('"".matches(x)', {"x": node.value})
    except (ValueError, RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise node.error(f"not a valid RE2 pattern: {reason}") from None


def _weight(pattern: str) -> int:
    """About the size of the compiled pattern: its classes times its counted repeats."""
    classes = len(_CLASS.findall(pattern))
    plain, nested = 1, 1
    for found in _COUNT.finditer(pattern):
        count = max(int(found["least"]), int(found["most"] or 0), 1)
        before = pattern[: found.start()][-1:]
        if before.isalnum() or before == "]":
            plain = max(plain, count)
        else:
            nested *= count
    return (1 + classes) * plain * nested


def _macro(node: Node, scope: _Scope) -> Type:
    lengths = (3, 4) if node.name == "map" else (3,)
    if len(node.parts) not in lengths or node.parts[1].kind != "ident":
        raise node.error(f"{node.name}() takes a variable and an expression, as in (x, x == 1)")
    if scope.loops and _MACROS[node.name] == "list":
        raise node.error(f"{node.name}() inside another macro could grow without bound")
    over, variable = _type(node.parts[0], scope), node.parts[1].name
    ours = variable in scope.variables and variable not in scope.loops
    if ours or variable in TYPE_NAMES or variable.startswith("__"):
        raise node.parts[1].error(f"{variable!r} cannot name a macro's variable")
    if over != "dyn" and not isinstance(over, tuple):
        raise node.error(f"{node.name}() goes over a list or a map, not {_words(over)}")
    turns = scope.turns * max(_length(node.parts[0], scope), 1)
    element: Type = over[1] if isinstance(over, tuple) else "dyn"
    variables = {**scope.variables, variable: element}
    inner = replace(scope, variables=variables, loops=scope.loops | {variable}, turns=turns)
    if node.name != "map" or len(node.parts) == 4:
        _bool(node.parts[2], inner, f"what {node.name}() asks of each element")
    if node.name == "map":
        return ("list", _type(node.parts[-1], inner))
    return "bool" if _MACROS[node.name] == "bool" else ("list", element)


def _length(node: Node, scope: _Scope) -> int:
    """The most elements that it can have."""
    if node.kind == "list":
        return len(node.parts)
    if node.kind == "map":
        return len(node.parts) // 2
    if node.kind == "method" and node.name in ("map", "filter"):
        return _length(node.parts[0], scope)
    if node.kind == "binary":
        return sum(_length(part, scope) for part in node.parts)
    if node.kind == "cond":
        return max(_length(part, scope) for part in node.parts[1:])
    return HEADERS_COUNT_MAX if node.name == "headers" else scope.budget.literals * 16


_RULES: dict[str, Callable[[Node, _Scope], Type]] = {
    "literal": _literal, "ident": _ident, "select": _select, "index": _index, "list": _list,
    "map": _map, "or": _logic, "and": _logic, "unary": _unary, "cond": _cond, "binary": _binary,
    "call": _call, "method": _method,
}  # fmt: skip
