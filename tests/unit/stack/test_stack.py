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


def _stack(folder: Path, lives: str, said: list[str]) -> Stack:
    part = next(part for part in PARTS if not part.after)
    (port,) = choose_ports(None, [part.name]).values()
    command = [sys.executable, str(PROGRAM), str(port), lives, str(folder)]
    program = Program(part.name, command, f"127.0.0.1:{port}", dict(os.environ), folder / "log")
    return Stack([part], [program], "file:///none", None, said.append, SAY_SECONDS)


async def test_a_start_waits_for_a_process_that_runs_however_long_its_store_takes(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    stack = _stack(tmp_path, "late", said)
    starting = asyncio.create_task(stack.start())
    async with asyncio.timeout(60):
        waiting = f"waiting for {PARTS[0].name}\n    not yet"
        while said.count(waiting) < 2 and not starting.done():
            await asyncio.sleep(0.01)

    assert not starting.done()
    assert said[0] == f"starting {PARTS[0].name}"
    (tmp_path / "now").touch()
    await starting
    await stack.stop(asyncio.Event())


async def test_a_start_fails_when_a_service_may_not_be_started_again(tmp_path: Path) -> None:
    stack = _stack(tmp_path, "2", [])

    with pytest.raises(StartFailed, match=f"{PARTS[0].name} cannot run") as failure:
        await asyncio.wait_for(stack.start(), 60)

    assert failure.value.code == 2
    await stack.stop(asyncio.Event())
