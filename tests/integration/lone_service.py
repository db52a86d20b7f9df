"""The console or the scaler as a process of its own; no instance has to be there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

START_S = 60.0


def _command(service: str, *arguments: str) -> list[str]:
    begin = [sys.executable, "-m", f"services.{service}", "--endpoint", "127.0.0.1:1"]
    return [*begin, "--parent-pid", str(os.getpid()), *arguments]


@asynccontextmanager
async def running(
    service: str,
    folder: Path,
    *arguments: str,
    environ: Mapping[str, str] | None = None,
    errors: Path | None = None,
) -> AsyncIterator[dict[str, str]]:
    """Its addresses; what it says on stderr goes into the file `errors`."""
    ready = folder / "ready"
    command = _command(service, "--ready-file", str(ready), *arguments)
    with errors.open("w") if errors is not None else nullcontext() as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **(environ or {})}, stderr=stderr
        )
    try:
        async with asyncio.timeout(START_S):
            while not ready.exists():
                assert process.returncode is None, "ended while starting"
                await asyncio.sleep(0.01)
        yield json.loads(ready.read_text())
    finally:
        process.terminate()
        assert await process.wait() == 0


async def refused(
    service: str, *arguments: str, environ: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """The exit code and the stderr of one that does not start."""
    process = await asyncio.create_subprocess_exec(
        *_command(service, *arguments),
        env={**os.environ, **(environ or {})},
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate()
    return process.returncode, errors.decode()
