"""What the pages say, held to what there is: settings, links, commands, code that compiles."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from libs.serving.process.config import load
from libs.serving.process.process_config import ProcessConfig, load_own
from libs.serving.process.settings import settings_of
from services.broker.config import BrokerConfig
from services.console.config import ConsoleConfig
from services.ingest.config import IngestConfig
from services.janitor.backup.command import parse as parse_backup
from services.janitor.config import JanitorConfig
from services.janitor.giving_up.command import parse as parse_give_up
from services.janitor.moving.command import parse as parse_move
from services.janitor.spark.sql import parse as parse_question
from services.janitor.verify.command import parse as parse_verify
from services.router.config import RouterConfig
from services.scaler.config import ScalerConfig
from services.stack.options import parse
from slatemq.cli.app import slatemq
from slatemq.cli.session import Session
from tests import documented_settings

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGS = {
    "broker": BrokerConfig,
    "ingest": IngestConfig,
    "janitor": JanitorConfig,
    "router": RouterConfig,
}
OWN_CONFIGS: dict[str, type[ProcessConfig]] = {"console": ConsoleConfig, "scaler": ScalerConfig}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def pages() -> list[Path]:
    known = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    names = known.stdout.split()
    found = [REPOSITORY / name for name in names] or [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
    ]
    return sorted(page for page in found if page.exists())


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in HEADING.findall(text)
    }


def commands(page: Path) -> list[str]:
    """The command lines of a page's console blocks, those ended by a backslash joined."""
    found = []
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "console":
            joined = block.replace("\\\n", " ")
            found += [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
    return found


def test_the_page_of_settings_is_what_the_settings_say() -> None:
    assert documented_settings.PAGE.read_text(encoding="utf-8") == documented_settings.page(), (
        "run python -m tests.documented_settings"
    )


def test_the_page_of_settings_has_each_setting_of_each_process() -> None:
    page = documented_settings.PAGE.read_text(encoding="utf-8").splitlines()

    missing = {
        f"{process}: {field.name}"
        for process, config in (CONFIGS | OWN_CONFIGS).items()
        for field in settings_of(config)
        if documented_settings.row(field) not in page
    }
    assert missing == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in LINK.findall(text):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_python_block_compiles(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            compile(block, str(page), "exec", flags=0x2000)  # top-level await is fine on a page


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_name_that_a_python_block_imports_from_slatemq_is_there(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language != "python":
            continue
        for node in ast.walk(compile(block, str(page), "exec", flags=0x2000 | ast.PyCF_ONLY_AST)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("slatemq"):
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    submodule = f"{node.module}.{alias.name}"
                    assert hasattr(module, alias.name) or find_spec(submodule), submodule


def test_every_command_that_starts_services_is_understood() -> None:
    # Given every command on any page that runs a service or the whole stack
    checked = 0
    for page in pages():
        for command in commands(page):
            words = [word for word in shlex.split(command, comments=True) if word != "&"]
            while words and "=" in words[0] and words[0].startswith("SLATEMQ_"):
                words.pop(0)
            if words[:2] != ["python", "-m"] or not words[2].startswith("services"):
                continue
            # Then the program takes it
            checked += 1
            _, _, service = words[2].partition(".")
            if "--help" in words:
                continue
            if words[3:4] == ["sql"]:
                parse_question(words[3:], {})
            elif words[3:4] == ["verify"]:
                parse_verify(words[3:], {})
            elif words[3:4] == ["backup"]:
                parse_backup(words[3:], {})
            elif words[3:4] == ["give-up"]:
                parse_give_up(words[3:], {"SLATEMQ_ROOT": "memory:///"})
            elif words[3:4] == ["move-wals"]:
                parse_move(words[3:], {"SLATEMQ_ROOT": "memory:///"})
            elif service in OWN_CONFIGS:
                load_own(OWN_CONFIGS[service], words[2], words[3:], {})
            elif service:
                load(CONFIGS[service], words[2], words[3:], {"SLATEMQ_ROOT": "memory:///"})
            else:
                parse(words[3:], 4, {})
    assert checked


def test_every_slatemq_command_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given every command line with slatemq in it, with the files that it names
    monkeypatch.chdir(REPOSITORY)
    checked = 0
    for page in pages():
        for command in commands(page):
            words = shlex.split(command.replace("HANDLE", "q/1f4"), comments=True)
            if "slatemq" not in words:
                continue
            # Then the command line takes all of it
            checked += 1
            parsed(slatemq, words[words.index("slatemq") + 1 :])
    assert checked


def parsed(command: click.Command, words: list[str], parent: click.Context | None = None) -> None:
    """Parse a command line down to its last command, running nothing."""
    context = command.make_context(command.name, words, parent=parent, obj=Session())
    if isinstance(command, click.Group):
        name, found, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found is not None, f"there is no command {name}"
        parsed(found, rest, context)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_and_test_named_exists(page: Path) -> None:
    named = re.findall(r"`([\w./-]+)`", FENCE.sub("", page.read_text(encoding="utf-8")))
    for name in named:
        if name.split("/")[0] in TOP_FOLDERS and "/" in name:
            assert (REPOSITORY / name).exists(), f"{name} does not exist"
        elif name.startswith("test_"):
            assert name in known_tests(), f"there is no {name}"


TOP_FOLDERS = ("benchmarks", "docs", "examples", "libs", "protos", "services", "slatemq", "tests")


@cache
def known_tests() -> frozenset[str]:
    found = set[str]()
    for source in (REPOSITORY / "tests").rglob("test_*.py"):
        found.update(re.findall(r"def (test_\w+)", source.read_text(encoding="utf-8")))
    return frozenset(found)


COLUMNS = 100
INDENTED_FENCE = re.compile(r"^ *```\w*\n.*?^ *```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_the_text_of_a_page_is_wrapped(page: Path) -> None:
    text = INDENTED_FENCE.sub("", page.read_text(encoding="utf-8"))
    long = [
        line
        for line in text.splitlines()
        if len(line) > COLUMNS and not line.lstrip().startswith(("|", "#"))
    ]

    assert long == []


def test_the_comments_of_protos_are_wrapped() -> None:
    protos = sorted((REPOSITORY / "protos").rglob("*.proto"))
    long = [
        f"{proto.name}:{number}"
        for proto in protos
        for number, line in enumerate(proto.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > COLUMNS
    ]

    assert long == []
    assert len(protos) > 20


TOUR = REPOSITORY / "docs" / "tour.md"
NAMED_FUNCTION = re.compile(r"`([\w/]+\.py):([\w.]+)`")
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def test_each_function_that_the_tour_names_is_there() -> None:
    named = NAMED_FUNCTION.findall(TOUR.read_text(encoding="utf-8"))

    missing = [
        f"{file}:{name}" for file, name in named if name not in functions_of(REPOSITORY / file)
    ]
    assert missing == []
    assert len(named) > 60


def functions_of(file: Path) -> set[str]:
    """The functions of a file; methods behind the name of their class."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=body):
                names |= {
                    f"{name}.{member.name}" for member in body if isinstance(member, FUNCTION)
                }
    return names
