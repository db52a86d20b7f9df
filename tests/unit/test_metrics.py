"""The page for operators lists every metric that there is, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs/how-to/operate.md"
INSTRUMENTS = {
    f"create_{kind}"
    for kind in (
        "counter",
        "gauge",
        "histogram",
        "live_counter",
        "live_gauge",
        "observable_counter",
        "observable_gauge",
        "observable_up_down_counter",
        "up_down_counter",
    )
}


def called(node: ast.AST) -> str:
    """The name of the function or method that is called; empty for what is no call."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def names(calls: list[ast.Call], module: ast.Module, constants: dict[str, str]) -> Iterator[str]:
    """What these calls name first: by a text, a constant, or the parameter of a function here."""
    for call in calls:
        name = call.args[0]
        if isinstance(name, ast.Constant):
            yield str(name.value)
        elif isinstance(name, ast.Attribute):
            yield constants[name.attr]
        elif isinstance(name, ast.Name) and name.id in constants:
            yield constants[name.id]
        else:
            (maker,) = (
                one.name
                for one in ast.walk(module)
                if isinstance(one, ast.FunctionDef)
                and call in ast.walk(one)
                and one.args.args
                and one.args.args[0].arg == getattr(name, "id", "")
            )
            makers = [one for one in ast.walk(module) if called(one) == maker]
            yield from names(
                [one for one in makers if isinstance(one, ast.Call)], module, constants
            )


def instruments() -> set[str]:
    modules = [
        ast.parse(path.read_text(encoding="utf-8"))
        for folder in ("libs", "services", "slatemq")
        for path in (REPOSITORY / folder).rglob("*.py")
    ]
    constants = {
        target.id: statement.value.value
        for module in modules
        for statement in module.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        for target in statement.targets
        if isinstance(target, ast.Name) and isinstance(statement.value.value, str)
    }
    found: set[str] = set()
    for module in modules:
        calls = [
            one
            for one in ast.walk(module)
            if called(one) in INSTRUMENTS and isinstance(one, ast.Call)
        ]
        found.update(names(calls, module, constants))
    return found


def test_the_page_for_operators_lists_all_metrics_and_no_other() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = [name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+)`", row)]

    assert sorted(listed) == sorted(instruments())


def test_no_name_that_users_see_is_that_of_a_private_module() -> None:
    pages = [*(REPOSITORY / "docs/how-to").glob("*.md"), REPOSITORY / "README.md"]
    seen = {name for page in pages for name in re.findall(r"`(slatemq\._[^`]*)`", page.read_text())}

    assert not [name for name in instruments() if "._" in name]
    assert not {name for name in seen if not name.endswith(")")}  # A function that is shown.
