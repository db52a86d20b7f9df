"""`python -m services`, with services that are forks of one process that has loaded them.

Its janitor does what it is asked to, and begins no job by itself: of a new instance all are due
within the first minute, by chance, and each starts a Spark, which takes seconds of a processor.
"""

from __future__ import annotations

import os
import sys
from asyncio.subprocess import DEVNULL
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.suite.servers import UNSCHEDULED
from services.stack.launcher import run
from services.stack.process import Supervised
from tests.ready_process import create_subprocess


async def spawn(self: Supervised, log: Path | None) -> Any:
    """See Supervised."""
    out = log.open("ab") if log is not None else nullcontext(sys.stderr)
    with out as stream:
        return await create_subprocess(
            *self._program.command,
            env=self._program.environ,
            stdin=DEVNULL,
            stdout=stream,
            stderr=stream,
            process_group=0,
        )


if __name__ == "__main__":
    Supervised._spawn = spawn  # type: ignore[method-assign]
    os.environ.update(UNSCHEDULED | os.environ)
    sys.exit(run(sys.argv[1:], os.environ))
