"""Bugs that are planted on purpose: each must be caught, or what should catch it is no judge.

A patch `<name>.patch` begins with what it breaks, and with what catches it: a world of the
simulation, or a test file::

    An ack is answered before its commit is durable.
    Caught-by: simulation, world 1

`python -m tests.planted` applies each to a copy of the tree, and runs that. Without the bug it must
find nothing.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parent.parent
SIMULATION: Final = "simulation, world "


@dataclass(frozen=True)
class Planted:
    """A patch: its name, what it breaks, and what catches it."""

    name: str
    breaks: str
    caught_by: str

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.patch"


def all_planted() -> list[Planted]:
    return [_read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _read(path: Path) -> Planted:
    breaks, caught_by = path.read_text().splitlines()[:2]
    return Planted(path.stem, breaks, caught_by.removeprefix("Caught-by: "))


def copy_tree(into: Path) -> None:
    """Copy all that git has or would add, so that a patch changes the copy alone."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    for name in listed.split("\0"):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def apply(planted: Planted, tree: Path) -> None:
    """Raises CalledProcessError where the patch does not fit the tree any more."""
    command = ["git", "apply", "--unsafe-paths", f"--directory={tree}", str(planted.path)]
    subprocess.run(command, check=True, capture_output=True, text=True, cwd="/")
