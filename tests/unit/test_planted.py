"""The planted bugs of `python -m tests.planted`: that each still fits, and can be caught."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.planted import ROOT, SIMULATION, Planted, all_planted
from tests.planted.__main__ import BEGIN, END, Caught, write_table

PLANTED = all_planted()
PAGE = ROOT / "docs" / "reliability.md"


def test_there_are_twenty_planted_bugs_at_least() -> None:
    assert len(PLANTED) >= 20


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_bug_fits_the_code_as_it_is(planted: Planted) -> None:
    command = ["git", "apply", "--check", str(planted.path)]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert checked.returncode == 0, f"{checked.stderr}: mend the patch, or plant another bug"


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_what_catches_a_planted_bug_exists(planted: Planted) -> None:
    assert planted.breaks.endswith(".")
    if planted.caught_by.startswith(SIMULATION):
        assert planted.caught_by.removeprefix(SIMULATION).isdecimal()
    else:
        assert (ROOT / planted.caught_by).is_file()


def test_the_page_has_every_planted_bug_and_what_caught_it() -> None:
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    for planted in PLANTED:
        assert f"| `{planted.name}` | {planted.breaks} | " in table, planted.name
    assert "| nothing |" not in table


def test_the_table_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write_table(page, [Caught(PLANTED[0], "simulation, world 2", "said", 3.4)])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    row = f"| `{PLANTED[0].name}` | {PLANTED[0].breaks} | simulation, world 2 | 3 |"
    assert row in text
    assert "old" not in text
