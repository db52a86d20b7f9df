"""A disk that is full for a while under an ingest and a broker.

A disk cannot be filled without root. A limit on the size of the files of a process (RLIMIT_FSIZE)
makes the kernel do what it does on a full disk: a file grows for a while, perhaps, and then the
write fails, at any place of a row.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from libs.serving.process.exits import EXIT_FAILED, EXIT_STORE_DOWN
from tests.faults.mixed_work import Work
from tests.faults.shard_processes import Member
from tests.faults.zombies import run_history

ANSWERS_BETWEEN = 20
ENDED_S = 120.0
EXPLANATION = os.strerror(errno.EFBIG)
FREE_BYTES = (0, 40, 300)
"""What still fits into a file of a full disk."""


class CrowdedMember(Member):
    """A member whose disk may be full."""

    def __init__(self, folder: Path, service: str, shard: int) -> None:
        super().__init__(folder, service, shard)
        self._free_bytes = resource.RLIM_INFINITY
        self._copying: list[subprocess.Popen[bytes]] = []

    @contextmanager
    def output(self) -> Iterator[IO[bytes]]:
        """Its log is on another disk."""
        with super().output() as log:
            copying = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=log)
            self._copying.append(copying)
            assert copying.stdin is not None
            with copying.stdin as ours:
                yield ours

    def last_words(self) -> str:
        self._finish_copying()
        return super().last_words()

    async def close(self) -> None:
        await super().close()
        self._finish_copying()

    def _finish_copying(self) -> None:
        for copying in self._copying:
            copying.wait()

    async def spawn(self, *command: str, **streams: Any) -> Any:
        return await super().spawn(*command, **streams, file_bytes_max=self._free_bytes)

    async def fill_disk(self, free_bytes: int) -> None:
        """Fill the disk until the owner has ended, and so did one that was started again.

        Then there is room, and it starts. Raises RuntimeError when an owner goes on, ends in
        another way, or does not say why it cannot start.
        """
        self._free_bytes = free_bytes
        limits = (free_bytes, resource.RLIM_INFINITY)
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, limits)
        try:
            async with asyncio.timeout(ENDED_S):
                code = await self.ended()
        except TimeoutError:
            raise RuntimeError(f"{self.name} goes on although its disk is full") from None
        try:
            await self.start(self.ports)
        except RuntimeError as error:
            if EXPLANATION not in str(error):
                raise
        else:
            raise RuntimeError(f"{self.name} starts on a full disk")
        again = await self.ended()
        # SlateDB may panic before it is known that the store is down: both are started again.
        if code not in (EXIT_STORE_DOWN, EXIT_FAILED) or again != EXIT_STORE_DOWN:
            raise RuntimeError(f"{self.name} ended with {code}, then {again}: {self.last_words()}")
        self._free_bytes = resource.RLIM_INFINITY
        await self.start(self.ports)


async def run_full_disk(folder: Path, rounds: int, seed: int, settled_s: float) -> Work:
    """In each round the disk of each owner is full once; clients work all the time."""
    random_ = random.Random(seed)
    owners = [CrowdedMember(folder, service, 0) for service in ("ingest", "broker")]
    router = Member(folder, "router", 0)

    async def mishaps(work: Work) -> None:
        for number in range(rounds):
            for owner in owners:
                answered = work.answered_count
                while work.answered_count < answered + ANSWERS_BETWEEN:
                    await asyncio.sleep(0.05)
                free = random_.choice(FREE_BYTES)
                await owner.fill_disk(free)
                print(f"round {number}: {owner.name} was full at {free} bytes", flush=True)

    members = [*owners, router]
    return await run_history(folder, members, owners[1], mishaps, settled_s=settled_s)
