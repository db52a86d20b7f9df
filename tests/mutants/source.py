"""Where the code can be changed: the operators of Cosmic Ray, and one of our own.

Of the operators, those that turn a decision: into its opposite, over its bound by one, or away.
What they change in a type changes nothing that runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, Final, NamedTuple

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

NAMES: Final = (
    "ReplaceComparisonOperator_Lt_LtE",
    "ReplaceComparisonOperator_LtE_Lt",
    "ReplaceComparisonOperator_Gt_GtE",
    "ReplaceComparisonOperator_GtE_Gt",
    "ReplaceComparisonOperator_Eq_NotEq",
    "ReplaceComparisonOperator_NotEq_Eq",
    "ReplaceComparisonOperator_Is_IsNot",
    "ReplaceComparisonOperator_IsNot_Is",
    "ReplaceBinaryOperator_Add_Sub",
    "ReplaceBinaryOperator_Sub_Add",
    "ReplaceBinaryOperator_Mul_FloorDiv",
    "ReplaceBinaryOperator_FloorDiv_Mul",
    "ReplaceBinaryOperator_BitOr_BitAnd",
    "ReplaceBinaryOperator_BitAnd_BitOr",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "AddNot",
    "NumberReplacer",
    "ExceptionReplacer",
    "ZeroIterationForLoop",
)


class DeleteStatement:
    """An operator, too: leaves out a statement that calls or assigns."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and _acts(node.children[0]):
            yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.children[0] = parso.parse(node.children[0].get_first_leaf().prefix + "pass")
        return node


def _acts(node: Any) -> bool:
    """Whether it is a call, an augmented assignment, or one to an attribute or an element."""
    if node.type != "expr_stmt":
        return bool(node.type in ("atom_expr", "await", "del_stmt"))
    return bool(node.children[0].type == "atom_expr")


OPERATORS: Final[dict[str, Any]] = {name: get_operator(f"core/{name}")() for name in NAMES}
OPERATORS["DeleteStatement"] = DeleteStatement()


class Mutant(NamedTuple):
    """One of the changes that an operator can make in a file, by its number from 0."""

    path: Path
    operator: str
    number: int
    line: int


def mutants_of(path: Path) -> list[Mutant]:
    tree = get_ast(path.read_text())
    return [
        Mutant(path, name, number, line)
        for name, operator in OPERATORS.items()
        for number, line in enumerate(
            start[0] for node in ast_nodes(tree) for start, _ in operator.mutation_positions(node)
        )
    ]


def changed_source(mutant: Mutant) -> str:
    source = mutant.path.read_text()
    return str(mutate_code(source, OPERATORS[mutant.operator], mutant.number))


def changed_code(mutant: Mutant) -> CodeType | None:
    """The code of the function that the change is in; None if no function runs otherwise by it."""
    path = str(mutant.path.resolve())
    before = _function(compile(mutant.path.read_text(), path, "exec"), mutant.line)
    if before is None:
        return None
    try:
        changed = compile(changed_source(mutant), path, "exec")
    except SyntaxError:  # of the * before keyword-only arguments it made another operator
        return None
    after = _function(changed, before.co_firstlineno)
    return None if after is None or _runs(after) == _runs(before) else after


def _function(code: CodeType, line: int) -> CodeType | None:
    """The function or method of a module's code that a line is in."""
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if not inner.co_flags & inspect.CO_OPTIMIZED:  # a class
                if found := _function(inner, line):
                    return found
            elif inner.co_firstlineno <= line <= _last_line(inner):
                return inner
    return None


def _last_line(code: CodeType) -> int:
    inner = (_last_line(one) for one in code.co_consts if isinstance(one, CodeType))
    return max(*(line or 0 for _, _, line in code.co_lines()), 0, *inner)


def _runs(code: CodeType) -> tuple[object, ...]:
    """What runs of it: not its lines and types."""
    consts = (_runs(one) if isinstance(one, CodeType) else repr(one) for one in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, *consts
