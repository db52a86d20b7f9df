"""A rolling upgrade under load: processes of an older version, one after another replaced by ours.

Each process is stopped and started as the new version, or fenced by it while it is frozen. Then one
goes back to the old version, as an operator does who is not sure, and forth again.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import subprocess
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from tests.acceptance.local_stack import REPOSITORY
from tests.faults.mixed_work import Work
from tests.faults.shard_processes import Member
from tests.faults.zombies import run_history
from tests.kept_stores import DATA_FILTER

ANSWERS_BETWEEN: Final = 40
WITHOUT_TAG: Final = "HEAD~5"
FORMATS: Final = "libs/storage/database/formats.py"


class NoUpgrade(Exception):
    """There is nothing to upgrade from, with the reason."""


def last_version() -> str:
    """The last tag, or a commit before this one while there is no tag, which is said."""
    tag = _git("describe", "--tags", "--abbrev=0", "--match", "v*", check=False)
    if tag:
        return tag
    print(f"there is no tag yet: upgraded from {WITHOUT_TAG}")
    return WITHOUT_TAG


def unpack(reference: str, folder: Path) -> Path:
    """The tree of a commit. Raises NoUpgrade where it is not there, or stores another format."""
    if not _git("rev-parse", "--verify", "--quiet", f"{reference}^{{commit}}", check=False):
        raise NoUpgrade(f"{reference} is not in this checkout")
    if reference == WITHOUT_TAG and _git("diff", reference, "--", FORMATS):
        raise NoUpgrade(f"{reference} has another format, which may change until there is a tag")
    archive = subprocess.run(
        ["git", "archive", reference], cwd=REPOSITORY, check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extraction_filter = DATA_FILTER
        packed.extractall(folder)
    return folder


def _git(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=REPOSITORY, check=check, capture_output=True, text=True
    )
    return done.stdout.strip()


class VersionedMember(Member):
    """A member that runs the code of a tree."""

    def __init__(self, folder: Path, service: str, shard: int, tree: Path) -> None:
        super().__init__(folder, service, shard)
        self.tree = tree

    async def spawn(self, *command: str, **streams: Any) -> Any:
        """Not forked: a process that has loaded our code cannot run other code."""
        environ = {**os.environ, "PYTHONPATH": str(self.tree)}
        return await asyncio.create_subprocess_exec(
            *command, **{**streams, "cwd": self.tree, "env": environ}
        )


async def run_upgrade(folder: Path, reference: str, seed: int) -> Work:
    """A history through an upgrade from this commit. Raises NoUpgrade."""
    old = folder / "old"
    old.mkdir()
    unpack(reference, old)
    members = [
        *(VersionedMember(folder, "ingest", shard, old) for shard in range(2)),
        VersionedMember(folder, "broker", 0, old),
        *(VersionedMember(folder, "router", shard, old) for shard in range(2)),
    ]
    random_ = random.Random(seed)

    async def mishaps(work: Work) -> None:
        for member in random_.sample(members, len(members)):
            await _change(work, member, REPOSITORY, random_)
        back = random_.choice(members)
        await _change(work, back, old, random_)
        await _change(work, back, REPOSITORY, random_)

    return await run_history(folder, members, members[2], mishaps, seed=seed)


async def _change(work: Work, member: VersionedMember, tree: Path, random_: random.Random) -> None:
    answered = work.answered_count
    while work.answered_count < answered + ANSWERS_BETWEEN:
        await asyncio.sleep(0.05)
    member.tree = tree
    fenced = member.service != "router" and random_.random() < 0.5
    change: Callable[[], Awaitable[None]] = member.kill
    if fenced:
        change = _replaced(member)
    await change()
    version = "new" if tree == REPOSITORY else "old"
    print(f"{member.name} is {version}{', which fenced the other' if fenced else ''}", flush=True)


def _replaced(member: VersionedMember) -> Callable[[], Awaitable[None]]:
    return lambda: member.replace(asyncio.sleep(0.5))
