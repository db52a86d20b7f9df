"""Commits in a thread whose futures are polled again too early: run as a program, by a test.

The semaphore lets the thread go on at once, so that each future is still pending when Python's
callback is left with it, while other threads want the interpreter all the time. A thread that holds
it here while it waits for a future's lock stops the whole process.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

from libs.serving.process.exits import exit_with
from libs.storage.database.binding import CALLS, DirectCalls
from libs.storage.database.roots import open_root
from libs.storage.database.settings import Kind
from libs.storage.database.slate import Batch
from tests.forms import examples

COMMITS = examples(200)
BUSY_THREADS = 3


class _Hasty:
    """Semaphores that never make a thread wait."""

    def __init__(self, semaphores: Any) -> None:
        self.init = semaphores.init
        self.post = semaphores.post

    def trywait(self, _: int) -> int:
        return -1

    def wait(self, _: int) -> int:
        return 0


async def _commit_all(folder: Path) -> None:
    database = await open_root(folder.as_uri()).database("ingest/0", Kind.INGEST)
    for number in range(COMMITS):
        batch = Batch()
        batch.put(b"%d" % number, b"v")
        await database.commit(batch)
    await database.close()


def _keep_busy() -> None:
    while True:
        sum(range(1000))


def main() -> None:
    assert isinstance(CALLS, DirectCalls)
    CALLS._semaphores = _Hasty(CALLS._semaphores)  # type: ignore[assignment]
    sys.setswitchinterval(1e-5)
    for _ in range(BUSY_THREADS):
        threading.Thread(target=_keep_busy, daemon=True).start()
    asyncio.run(_commit_all(Path(sys.argv[1])))
    sys.stdout.write(f"{COMMITS}\n")
    exit_with(0)


if __name__ == "__main__":
    main()
