"""docs/security.md: each answer to a threat names tests, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/security.md"
THREATS = PAGE.read_text().partition("## Threats")[2].partition("\n## ")[0]
ROWS = [line.strip("|").split("|") for line in THREATS.splitlines() if line.startswith("| ")][1:]
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", THREATS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_each_threat_has_an_answer_and_a_test(row: list[str]) -> None:
    threat, answer, test = map(str.strip, row)

    assert threat
    assert answer
    assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`(, `tests/[\w/]+\.py::test_\w+`)*", test)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_named_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_page_has_threats() -> None:
    assert len(ROWS) > 15
    assert len(NAMED) >= len(ROWS)
