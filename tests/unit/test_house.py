"""The house rules of CONTRIBUTING.md that a program can look at."""

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from types import FunctionType

import pytest

import slatemq

ROOT = Path(__file__).resolve().parents[2]
OURS = ("slatemq", "libs", "services")

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70
MAIN_LINES_MAX = 30
FOLDER_FILES_MAX = 25
ROOM_FLOORS_MAX = 10

LONGER_FILES: dict[str, str] = {}
"""Files over 800 lines, each with the reason why it is better whole."""

BARRED_NAMES = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}

HIDDEN_IMPORT = re.compile(rf"^[ \t]+(?:from|import)\s+(?:{'|'.join(OURS)})\b", re.MULTILINE)
"""Of a function, or of a block such as `if TYPE_CHECKING`."""

IN_READING_ORDER = "a file imports only files above it:"

UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")


def _tracked() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


@functools.cache
def _sources() -> dict[str, str]:
    """Text by path of every hand-written Python file."""
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
        for path in _tracked()
        if path.suffix == ".py" and "_pb2" not in path.name
    }


@functools.cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_sources()[name])


@functools.cache
def _nodes(name: str) -> list[ast.AST]:
    """All of its tree, which many tests look at: to walk it takes longer than to look."""
    return list(ast.walk(_tree(name)))


def _product() -> Iterator[tuple[str, ast.Module]]:
    for name in _sources():
        if name.split("/")[0] in OURS:
            yield name, _tree(name)


def _functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in _nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_no_file_is_too_long_without_a_reason() -> None:
    lines = {name: text.count("\n") for name, text in _sources().items()}

    too_long = {n: count for n, count in lines.items() if count > FILE_LINES_MAX}

    assert too_long.keys() == LONGER_FILES.keys(), too_long


def test_no_function_is_too_long() -> None:
    too_long = [
        f"{name}:{function.lineno} {function.name}"
        for name in _sources()
        for function in _functions(name)
        if (function.end_lineno or 0) - function.lineno >= FUNCTION_LINES_MAX
    ]

    assert too_long == []


def test_each_main_is_short() -> None:
    too_long = [
        name
        for name, text in _sources().items()
        if re.fullmatch(r"services/\w+/__main__\.py", name) and text.count("\n") > MAIN_LINES_MAX
    ]

    assert too_long == []


def test_no_module_is_named_after_nothing() -> None:
    named = [name for name in _sources() if BARRED_NAMES & set(Path(name).with_suffix("").parts)]

    assert named == []


def test_each_package_names_all_its_files() -> None:
    unnamed = [
        f"{name}: {member}"
        for name, tree in _product()
        if name.endswith("/__init__.py") and not name.startswith("slatemq/v1/")
        for member in _members(ROOT / Path(name).parent)
        if f"`{member}`" not in (ast.get_docstring(tree) or "")
    ]

    assert unnamed == []


def test_each_package_lists_a_file_behind_those_that_it_imports() -> None:
    packages = {
        str(Path(name).parent): text
        for name, tree in _product()
        if IN_READING_ORDER in (text := ast.get_docstring(tree) or "")
    }
    misplaced = [
        f"{package}: {member} imports {imported}"
        for package, text in packages.items()
        for members in [re.findall(r"^`(\w+)`", text.split(IN_READING_ORDER)[1], re.MULTILINE)]
        for place, member in enumerate(members)
        for imported in members[place + 1 :]
        if imported in _imports_within(package, member)
    ]

    assert misplaced == []
    assert len(packages) > 40


@functools.cache
def _imports_within(package: str, member: str) -> set[str]:
    """The files and rooms of a package that one of them imports."""
    path, prefix = f"{package}/{member}", f"{package.replace('/', '.')}."
    return {
        module.removeprefix(prefix).split(".")[0]
        for name in _sources()
        if name == f"{path}.py" or name.startswith(f"{path}/")
        for module in _imports(name)
        if module.startswith(prefix)
    }


def test_no_imports_go_in_a_circle_not_even_those_for_types_alone() -> None:
    modules = {_module(name): name for name in _sources() if not name.endswith("__init__.py")}
    arrows = {module: _imports(name) & modules.keys() for module, name in modules.items()}

    TopologicalSorter({module: to - {module} for module, to in arrows.items()}).prepare()


def test_no_room_of_the_broker_has_more_than_ten_floors() -> None:
    modules = {_module(name): name for name, _ in _product() if not name.endswith("__init__.py")}
    rooms = {path.name for path in (ROOT / "services" / "broker").iterdir() if path.is_dir()}
    floors = {room: _floors(f"services.broker.{room}.", modules) for room in rooms}

    assert {room: count for room, count in floors.items() if count > ROOM_FLOORS_MAX} == {}
    assert floors["core"] > 1


def _floors(prefix: str, modules: dict[str, str]) -> int:
    """How many files import one another in a row, among those whose module has this prefix."""
    inside = {module for module in modules if module.startswith(prefix)}
    arrows = {module: _imports(modules[module]) & (inside - {module}) for module in inside}
    floor: dict[str, int] = {}
    for module in TopologicalSorter(arrows).static_order():
        floor[module] = 1 + max((floor[one] for one in arrows[module]), default=0)
    return max(floor.values(), default=0)


def _module(name: str) -> str:
    return name.removesuffix(".py").replace("/", ".")


@functools.cache
def _imports(name: str) -> frozenset[str]:
    """What a file imports, also in functions and for types alone."""
    return frozenset(one for node in _nodes(name) for one in _imported_modules(node))


def _imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return _imported(node)


def test_no_folder_is_a_corridor() -> None:
    files: Counter[Path] = Counter(
        Path(name).parent for name, _ in _product() if not name.startswith("slatemq/v1/")
    )

    assert {str(folder): count for folder, count in files.items() if count > FOLDER_FILES_MAX} == {}


def _members(folder: Path) -> set[str]:
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    return files | {path.parent.name for path in folder.glob("*/__init__.py")}


def test_no_error_is_raised_within_an_except_star() -> None:
    """Until Python 3.11.4 it comes in a group; `first_raised` does without."""
    found = [name for name, _ in _product() for one in _nodes(name) if isinstance(one, ast.TryStar)]

    assert found == []


def test_no_import_of_ours_hides_in_a_function() -> None:
    hidden = [
        f"{name}:{function.lineno} {function.name}"
        for name, tree in _product()
        if HIDDEN_IMPORT.search(_sources()[name])
        for function in _functions(name)
        for node in ast.walk(function)
        if any(module.split(".")[0] in OURS for module in _imported(node))
    ]

    assert hidden == []


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module]
    return []


def test_nothing_is_left_for_later() -> None:
    left = [
        f"{name}:{number}"
        for name, text in _sources().items()
        if name != "tests/unit/test_house.py"
        for number, line in enumerate(text.splitlines(), 1)
        if UNFINISHED.search(line)
    ]

    assert left == []


def test_no_merge_is_left_half_done() -> None:
    marks = (b"<" * 7 + b" ", b">" * 7 + b" ")
    left = [
        str(path.relative_to(ROOT))
        for path in _tracked()
        if any(line.startswith(marks) for line in path.read_bytes().splitlines())
    ]

    assert left == []


def test_every_module_and_every_class_that_users_import_is_documented() -> None:
    modules = [name for name, tree in _product() if tree.body and not ast.get_docstring(tree)]
    exported = {
        name
        for name in slatemq.__all__
        if isinstance(thing := getattr(slatemq, name), type | FunctionType) and not thing.__doc__
    }

    assert modules == []
    assert exported == set()


@pytest.mark.parametrize(
    ("module", "but"),
    [
        ("slatemq.errors", set()),
        ("slatemq._secrets", {"slatemq.errors"}),
        ("libs.serving.process.exits", set()),
        ("libs.storage.errors", {"slatemq._secrets"}),
    ],
)
def test_what_everybody_imports_imports_nothing_else_of_ours(module: str, but: set[str]) -> None:
    path = ROOT / (module.replace(".", "/") + ".py")
    imported = {m for node in ast.walk(ast.parse(path.read_text())) for m in _imported(node)}

    assert {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names} == but


def test_make_proofs_runs_each_test_that_has_a_number_of_examples() -> None:
    left_out = [
        name
        for name, text in _sources().items()
        if Path(name).name.startswith("test_") and "import examples\n" in text
        if "mark.repeated" not in text and "hypothesis" not in text
    ]

    assert left_out == []


def test_pins_are_hashed_and_name_no_place_to_fetch_from() -> None:
    for path in (ROOT / "requirements").glob("*.txt"):
        text = path.read_text()
        assert "://" not in text, path.name
        assert "-index-url" not in text, path.name
        pins = [line for line in text.splitlines() if "==" in line and not line.startswith(" ")]
        assert pins
        assert text.count("--hash=sha256:") >= len(pins)
        assert all(line.rstrip().endswith("\\") for line in pins)


def test_every_page_that_a_page_links_to_is_there() -> None:
    link = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")
    dead = [
        f"{path.relative_to(ROOT)} → {target}"
        for path in _tracked()
        if path.suffix == ".md"
        for target in link.findall(path.read_text(encoding="utf-8"))
        if not (path.parent / target).exists()
    ]

    assert dead == []
