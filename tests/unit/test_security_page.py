"""docs/security.md: each answer to a threat names tests, and all of them exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/security.md"
THREATS = PAGE.read_text().partition("## Threats")[2].partition("\n## ")[0]
CELLS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in THREATS.splitlines()
    if re.match(r"\| \d+ ", line)
]
ROWS = [cells for cells in CELLS if len(cells) == 3]
TESTS = {cells[0]: cells[1] for cells in CELLS if len(cells) == 2}
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", THREATS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1][:40])
def test_each_threat_has_an_answer_and_a_test(row: list[str]) -> None:
    number, threat, answer = row
    tests = TESTS[number]

    assert threat
    assert answer
    assert re.fullmatch(r"`tests/[\w/]+\.py::test_\w+`(, `tests/[\w/]+\.py::test_\w+`)*", tests)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_named_test_exists(file: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(), re.MULTILINE)


def test_the_page_has_threats() -> None:
    assert [number for number, *_ in ROWS] == [*TESTS]
    assert len(ROWS) > 15
    assert len(NAMED) >= len(ROWS)
