"""Takes a backup, and is killed before it writes for the nth time; prints what it writes.

python -m tests.integration.janitor.backup.killed_taking ROOT BACKUPS NUMBER

NUMBER 0 lets it end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from libs.serving.process.exits import exit_with
from libs.storage.database.roots import Root, open_root
from libs.storage.objects.small_objects import Objects
from services.janitor.backup import turns
from services.janitor.backup.shards import snapshots_of_stopped
from services.janitor.backup.taking import BackupSource, Taking
from services.janitor.runs.history import RunStore

WRITES = ("put", "put_if_absent", "copy_to")
"""Methods of Objects; the last is called on what is copied, the others on the backup root."""


async def take(root: Root, backups: Root, killed_at: int) -> None:
    written = 0

    def counted(name: str) -> None:
        method = getattr(Objects, name)

        async def called(self: Objects, *arguments: Any, **rest: Any) -> Any:
            nonlocal written
            if name == "copy_to" or self is backups.objects:
                written += 1
                sys.stdout.write(f"{arguments[0]}\n")
                sys.stdout.flush()
                if written == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            return await method(self, *arguments, **rest)

        setattr(Objects, name, called)

    turns.RENEW_S = 3600.0  # type: ignore[misc]  # Renewals come at any moment.
    for name in WRITES:
        counted(name)
    source = BackupSource(root, lambda: snapshots_of_stopped(root, 0), RunStore(root.objects))
    await Taking(source, backups, kept=5).take()


if __name__ == "__main__":
    root_url, backups_url, number = sys.argv[1:]
    taken = take(open_root(root_url, sync=False), open_root(backups_url, sync=False), int(number))
    asyncio.run(taken)
    exit_with(0)
