"""The planted bugs of `python -m tests.planted`: that each still fits, and can be caught."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.planted import ROOT, SIMULATION, Planted, all_planted
from tests.planted.__main__ import (
    BEGIN,
    END,
    Caught,
    Control,
    catch_by_test,
    catch_by_world,
    write_table,
)

PLANTED = all_planted()
PAGE = ROOT / "docs" / "reliability.md"


def test_there_are_twenty_planted_bugs_at_least() -> None:
    assert len(PLANTED) >= 20


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_bug_fits_the_code_as_it_is(planted: Planted) -> None:
    command = ["git", "apply", "--check", str(planted.path)]
    checked = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert checked.returncode == 0, f"{checked.stderr}: repair the patch, or plant another bug"


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


def test_what_fails_without_the_bug_or_breaks_has_caught_nothing(tmp_path: Path) -> None:
    # Given a test that fails in the tree without a bug, and a tree whose worlds do not run
    control = Control(tmp_path)
    failing = "tests/unit/test_failing.py"
    (tmp_path / failing).write_text("def test_it():\n    assert False\n")
    (tmp_path / "tests" / "simulation" / "run.py").write_text("import nothing_of_this_name\n")

    # When they are to catch a bug, then they have not
    by, said = catch_by_test(tmp_path, failing, control)
    assert (by, said) == ("", f"{failing} fails without the bug")
    by, said = catch_by_world(tmp_path, [1], control)
    assert by == ""
    assert "seed 1 broke" in said
    assert not control.passes(f"{SIMULATION}1")


def test_rows_take_the_place_of_those_before_and_others_stay(tmp_path: Path) -> None:
    # Given a table with two bugs, and one that is not planted any more
    page = tmp_path / "page.md"
    first, second = PLANTED[:2]
    head = "| planted |\n|---|"
    rows = [f"| `{name}` | old |" for name in (first.name, second.name, "given-up")]
    page.write_text("\n".join(["before", BEGIN, head, *rows, END, "after"]) + "\n")

    # When one of them was run
    write_table(page, [Caught(first, "simulation, world 2", "said", 3.4)])

    # Then its row is another, and the one that is not planted is gone
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{END}\nafter\n")
    row = f"| `{first.name}` | {first.breaks} | simulation, world 2 | said | 3 |"
    assert f"{row}\n{rows[1]}\n{END}" in text
    assert "given-up" not in text
