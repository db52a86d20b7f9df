"""Names and texts use the words of docs/glossary.md, and none of those that they replace."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_house import ROOT, _functions, _nodes, _product, _sources

GLOSSARY = Path(__file__).resolve().parents[2] / "docs" / "glossary.md"

BARRED = {
    "anew",
    "desk",
    "desks",
    "guest",
    "guests",
    "letter",
    "letters",
    "mend",
    "mended",
    "nobody",
    "somebody",
    "teller",
    "telling",
    "tell",
    "tells",
    "told",
    "whoever",
}

BARRED_IN_THE_PRODUCT = {
    "away",
    "hand",
    "looker",
    "lookers",
    "news",
    "who",
    "wish",
    "wishes",
}
"""The same for names of the product alone: tests have sentences, of those who go away."""

BARRED_IN_TEXTS = re.compile(
    r"\b(told|tells?(?!\()|telling|whoever|nobody|somebody|anew|mend(s|ed|ing)?|for good|at hand"
    r"|puts? aside|heed(s|ed)?|\w+_away|(is|are|was|were|be|been) away)\b",
    re.IGNORECASE,
)
TEXTS = (
    *("services", "libs", "slatemq", "protos", "docs", "examples", "benchmarks", "deploy"),
    *("*.md", "*.yml", "Dockerfile", "Makefile"),
)
ENDINGS = (".py", ".proto", ".md", ".html", ".js", ".yaml", ".yml", "file")
NAMING_THEM = {
    "docs/glossary.md",
    "benchmarks/suite/servers.py",  # the user "nobody"
}

ELSEWHERE = {
    ("libs/storage/objects/small_objects.py", "tell"),  # the method of a file
    ("slatemq/textqueue/pages.py", "tell"),
}
"""Names that are not ours to choose."""


def test_no_name_has_a_word_that_the_glossary_replaces() -> None:
    barred = {
        f"{file}: {name}"
        for file, _ in _product()
        for name in set(_names(file))
        if (BARRED | BARRED_IN_THE_PRODUCT) & set(_words(name)) and (file, name) not in ELSEWHERE
    }

    assert barred == set()


def test_no_name_of_a_test_has_a_word_that_the_glossary_replaces() -> None:
    barred = {
        f"{file}: {function.name}"
        for file in _sources()
        if file.startswith("tests/")
        for function in _functions(file)
        if function.name.startswith("test_") and BARRED & set(_words(function.name))
    }

    assert barred == set()


def test_no_text_has_a_word_that_the_glossary_replaces() -> None:
    files = subprocess.run(
        ["git", "ls-files", "--", *TEXTS], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    barred = [
        f"{file}:{number}: {found.group()}"
        for file in files
        if file.endswith(ENDINGS) and file not in NAMING_THEM
        if BARRED_IN_TEXTS.search(text := (ROOT / file).read_text(encoding="utf-8"))
        for number, line in enumerate(text.splitlines(), 1)
        if (found := BARRED_IN_TEXTS.search(line))
    ]

    assert barred == []
    assert len(files) > 500


def test_a_name_is_its_words_in_any_case() -> None:
    assert _words("tell_s") == _words("TELL_S") == ["tell", "s"]
    assert _words("RPCLetters") == _words("RPC_LETTERS") == ["rpc", "letters"]
    assert _words("DEAD_LETTERS_MAX") == ["dead", "max"]


def test_the_glossary_has_one_row_for_each_word() -> None:
    rows = [line.split("|")[1].strip() for line in GLOSSARY.read_text().splitlines() if "|" in line]

    words = [row for row in rows if row and not set(row) <= set("-: ")]
    assert len(words) > 30
    assert len(words) == len(set(words))


def _names(file: str) -> Iterator[str]:
    for node in _nodes(file):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name


def _words(name: str) -> list[str]:
    """The words of a name, but for those of "dead letter"."""
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return [
        part
        for place, part in enumerate(parts)
        if not (part in ("letter", "letters") and place and parts[place - 1] == "dead")
    ]
