"""The start of a whole stack, over a real process."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from services.stack.ports import choose_ports
from services.stack.process import Program
from services.stack.stack import PARTS, Stack, StartFailed

PROGRAM = Path(__file__).with_name("health_program.py")
SAY_SECONDS = 0.5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*child watcher.*:DeprecationWarning"),
]


def _stack(folder: Path, said: list[str], *lives: str) -> Stack:
    """The first two parts at most, of which the second one waits for the first."""
    parts = PARTS[: len(lives)]
    programs = []
    for part, words, port in zip(
        parts, lives, choose_ports(None, [part.name for part in parts]).values(), strict=True
    ):
        own = folder / part.name
        own.mkdir()
        command = [sys.executable, str(PROGRAM), str(port), words, str(own)]
        programs.append(
            Program(part.name, command, f"127.0.0.1:{port}", dict(os.environ), own / "log")
        )
    return Stack(parts, programs, "file:///none", None, said.append, SAY_SECONDS)


async def test_a_start_waits_for_a_process_that_runs_however_long_its_store_takes(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    stack = _stack(tmp_path, said, "late")
    starting = asyncio.create_task(stack.start())
    async with asyncio.timeout(60):
        waiting = f"waiting for {PARTS[0].name}\n    not yet"
        while said.count(waiting) < 2 and not starting.done():
            await asyncio.sleep(0.01)

    assert not starting.done()
    assert said[0] == f"starting {PARTS[0].name}"
    (tmp_path / PARTS[0].name / "now").touch()
    await starting
    await stack.stop(asyncio.Event())


async def test_a_start_fails_when_a_service_may_not_be_started_again(tmp_path: Path) -> None:
    stack = _stack(tmp_path, [], "2")

    with pytest.raises(StartFailed, match=f"{PARTS[0].name} cannot run") as failure:
        await asyncio.wait_for(stack.start(), 60)

    assert failure.value.code == 2
    await stack.stop(asyncio.Event())


async def test_a_start_fails_when_a_service_is_refused_that_has_served(tmp_path: Path) -> None:
    # Given the first service, which serves, and the second one, which does not yet
    said: list[str] = []
    stack = _stack(tmp_path, said, "brief", "late")
    starting = asyncio.create_task(stack.start())
    async with asyncio.timeout(60):
        while f"starting {PARTS[1].name}" not in said:
            await asyncio.sleep(0.01)

    # When the first one ends, as one does whose backend refuses a setting
    (tmp_path / PARTS[0].name / "now").touch()

    with pytest.raises(StartFailed, match=f"{PARTS[0].name} cannot run") as failure:
        await asyncio.wait_for(starting, 60)
    assert failure.value.code == 2
    await stack.stop(asyncio.Event())
