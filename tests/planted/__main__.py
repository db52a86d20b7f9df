"""`python -m tests.planted`: plants each bug in a copy of the tree, and says what caught it.

    python -m tests.planted                        all of them, one after the other
    python -m tests.planted token-reused           one of them
    python -m tests.planted token-reused --write docs/reliability.md

A bug that the simulation catches gets the world that its patch names, and then worlds 1, 2, 3, …,
until one breaks a rule: a change of the code changes what happens in a world. What catches a bug
must pass without it. The exit code is 1 where a bug was not caught.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from tests.planted import SIMULATION, Planted, all_planted, apply, copy_tree
from tests.simulation.seeds import NoVerdict, Settings, rule_of, run_seed

WORLDS: Final = 20
SETTINGS: Final = Settings(messages=20, mishaps=2.0)
TEST_S: Final = 1200
"""For the tests of a file: a handler of an event loop may swallow pytest's limit for one."""

ENDLESS: Final = "the world is not over"
BEGIN: Final = "<!-- planted bugs: python -m tests.planted --write docs/reliability.md -->"
END: Final = "<!-- end of planted bugs -->"
HEAD: Final = (
    "| planted | what it breaks | caught by | rule or test | s |",
    "|---|---|---|---|---|",
)


class Caught(NamedTuple):
    """What became of a planted bug; `by` is empty where nothing caught it.

    Attributes:
        said: The rule that was broken, or the test that failed.
    """

    planted: Planted
    by: str
    said: str
    seconds: float


class Control:
    """The tree without a bug: what catches one must find nothing here."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._passing: dict[str, bool] = {}
        copy_tree(tree)

    def passes(self, caught_by: str) -> bool:
        if caught_by not in self._passing:
            self._passing[caught_by] = self._pass(caught_by)
        return self._passing[caught_by]

    def _pass(self, caught_by: str) -> bool:
        if not caught_by.startswith(SIMULATION):
            return run_test(self._tree, caught_by).returncode == 0
        with suppress(NoVerdict):
            seed = caught_by.removeprefix(SIMULATION)
            return not run_seed(seed, SETTINGS, tree=self._tree)["violation"]
        return False


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.planted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Patches; all without any.")
    parser.add_argument("--worlds", type=int, default=WORLDS, help="Worlds for each bug at most.")
    parser.add_argument("--write", type=Path, help="Put their rows into this page.")
    options = parser.parse_args()
    known = {planted.name: planted for planted in all_planted()}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no patch is named {unknown[0]}; there are: {', '.join(known)}")
    caught = []
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        control = Control(Path(folder))
        for name in options.names or known:
            caught.append(one := catch(known[name], options.worlds, control))
            print(f"{name}: {one.by or 'NOT CAUGHT'}, {one.seconds:.0f} s: {one.said}", flush=True)
    if options.write is not None:
        write_table(options.write, caught)
    missed = sum(not one.by for one in caught)
    print(f"{len(caught)} planted, {len(caught) - missed} caught")
    sys.exit(1 if missed else 0)


def catch(planted: Planted, worlds: int, control: Control) -> Caught:
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        apply(planted, tree)
        began_s = time.monotonic()
        if planted.caught_by.startswith(SIMULATION):
            first = int(planted.caught_by.removeprefix(SIMULATION))
            by, said = catch_by_world(tree, [first, *range(1, worlds + 1)], control)
        else:
            by, said = catch_by_test(tree, planted.caught_by, control)
        return Caught(planted, by, said, time.monotonic() - began_s)


def catch_by_world(tree: Path, seeds: Sequence[int], control: Control) -> tuple[str, str]:
    for seed in seeds:
        by = f"{SIMULATION}{seed}"
        try:
            rule = rule_of(run_seed(str(seed), SETTINGS, tree=tree)["violation"])
        except NoVerdict as error:
            return "", str(error)
        # A world that does not end may be slow; it shows no rule.
        if rule and not rule.startswith(ENDLESS) and control.passes(by):
            return by, rule
    return "", f"{len(seeds)} worlds broke no rule"


def run_test(tree: Path, path: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", "--timeout", "60", path]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=tree,
            env=environment,
            check=False,
            timeout=TEST_S,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, -signal.SIGKILL, "", "")


def catch_by_test(tree: Path, path: str, control: Control) -> tuple[str, str]:
    if not control.passes(path):
        return "", f"{path} fails without the bug"
    ended = run_test(tree, path)
    failed = [line for line in ended.stdout.splitlines() if line.startswith("FAILED")]
    if ended.returncode != 1 or not failed:
        return "", f"pytest ended with {ended.returncode}"
    return path, failed[0].removeprefix("FAILED ").partition("::")[2].partition(" - ")[0]


def write_table(page: Path, caught: Sequence[Caught]) -> None:
    """Put these rows into the table of a page; those of other bugs that are planted stay."""
    before, _, rest = page.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {_name_of(row): row for row in table.strip().splitlines()[len(HEAD) :]}
    rows |= {
        one.planted.name: f"| `{one.planted.name}` | {one.planted.breaks} | {one.by or 'nothing'} "
        f"| {_cell(one)} | {one.seconds:.0f} |"
        for one in caught
    }
    kept = [rows[planted.name] for planted in all_planted() if planted.name in rows]
    page.write_text(f"{before}{BEGIN}\n" + "\n".join([*HEAD, *kept]) + f"\n{END}{after}")


def _name_of(row: str) -> str:
    return row.split("`")[1]


def _cell(one: Caught) -> str:
    text = one.said.replace("|", "\\|")
    return text if one.by.startswith(SIMULATION) else f"`{text}`"


if __name__ == "__main__":
    main()
