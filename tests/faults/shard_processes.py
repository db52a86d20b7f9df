"""Service processes that are killed, frozen, replaced and thawed, each supervised as in production.

A member is one shard of one service. Its owner may be killed (and is started again), frozen for a
while, or frozen and replaced by a successor at another port: when the frozen one thaws it is a
zombie, an owner that does not know yet that it was replaced.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from libs.serving.process.exits import EXIT_FENCED
from tests.acceptance.local_stack import REPOSITORY
from tests.ports import free_ports
from tests.ready_process import create_subprocess

START_SECONDS = 180.0
"""A start on a machine that runs a whole stack and its load beside."""

ZOMBIE_SECONDS = 90.0
"""How long a thawed, replaced owner may take to notice and end."""


class Member:
    """One shard of a service: its current process, and frozen ones that it replaced."""

    def __init__(self, folder: Path, service: str, shard: int, *arguments: str) -> None:
        """Nothing runs before `start`. `folder` holds the data of all members."""
        self._arguments = arguments
        self.service = service
        self.shard = shard
        self.address = self.peer_address = ""
        self.ports: Sequence[int] = ()
        self.exits: Counter[int] = Counter()
        self.folder = folder
        self._starts = 0
        self._process: Any = None

    @property
    def name(self) -> str:
        """As in `ingest-0`."""
        return f"{self.service}-{self.shard}"

    @property
    def root(self) -> str:
        """URL of the folder with the data of all members."""
        return (self.folder / "data").as_uri()

    @property
    def log(self) -> Path:
        """The standard error of all its processes."""
        return self.folder / f"{self.name}.log"

    @property
    def runs(self) -> bool:
        """Whether there is a process of it."""
        return self._process is not None and self._process.returncode is None

    @property
    def pid(self) -> int:
        """Process ID of the current owner."""
        assert self._process is not None
        return int(self._process.pid)

    async def start(self, ports: Sequence[int] = ()) -> None:
        """Start an owner at these ports, or where it is free, and wait until it serves."""
        ready = await self.begin(ports)
        async with asyncio.timeout(START_SECONDS):
            while not ready.exists():
                self.check_running()
                await asyncio.sleep(0.05)
        self.note_ready(ready)

    def note_ready(self, ready: Path) -> None:
        """Take the addresses from the file of a process that serves."""
        addresses = json.loads(ready.read_text())
        self.address, self.peer_address = addresses["address"], addresses["peer_address"]

    async def begin(self, ports: Sequence[int] = ()) -> Path:
        """Start a process at these ports, or where it is free; returns its ready file."""
        self._starts += 1
        port, peer_port = self.ports = ports or free_ports(2)
        ready = self.folder / f"{self.name}.{self._starts}.ready"
        with self.output() as log:
            self._process = await self.spawn(
                *(sys.executable, *self.program, "--shard", str(self.shard)),
                *("--root", self.root, "--port", str(port)),
                *("--peer-port", str(peer_port)),
                *("--ready-file", str(ready), "--parent-pid", str(os.getpid())),
                *self._arguments,
                cwd=REPOSITORY,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return ready

    def check_running(self) -> None:
        """Raises RuntimeError where the process that was started last has ended."""
        if self._process.returncode is not None:
            raise RuntimeError(f"{self.name} ended while starting: {self.last_words()}")

    async def spawn(self, *command: str, **streams: Any) -> Any:
        """A process of it, as `asyncio.create_subprocess_exec` gives it."""
        return await create_subprocess(*command, **streams)

    @property
    def program(self) -> Sequence[str]:
        """What Python runs."""
        return "-m", f"services.{self.service}"

    async def ended(self) -> int:
        """Wait until the owner has ended by itself; returns its exit code."""
        assert self._process is not None, "never started"
        return int(await self._process.wait())

    @contextmanager
    def output(self) -> Iterator[IO[bytes]]:
        """Where a process of it writes its standard error to."""
        with self.log.open("ab") as log:
            yield log

    async def kill(self) -> None:
        """SIGKILL the owner, and start another at the same addresses."""
        await self.end()
        await self.start(self.ports)

    async def end(self) -> None:
        """SIGKILL the owner."""
        await self.send(signal.SIGKILL).wait()

    async def freeze(self, meanwhile: Awaitable[None]) -> None:
        """Stop the owner while something goes on; no other takes its shard."""
        process = self.send(signal.SIGSTOP)
        try:
            await meanwhile
        finally:
            process.send_signal(signal.SIGCONT)

    async def replace(self, meanwhile: Awaitable[None]) -> None:
        """Freeze the owner, start a successor elsewhere, thaw it, and wait until it has ended.

        It is thawed once `meanwhile` is over, which begins when the successor serves.

        Raises RuntimeError when the zombie goes on, or ends as anything but fenced.
        """
        zombie = self.send(signal.SIGSTOP)
        try:
            await self.start()
            await meanwhile
        finally:
            zombie.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(ZOMBIE_SECONDS):
                code = await zombie.wait()
        except TimeoutError:
            raise RuntimeError(f"{self.name}: a replaced owner goes on serving") from None
        self.exits[code] += 1
        if code != EXIT_FENCED:
            raise RuntimeError(f"{self.name}: a replaced owner ended with {code}, not as fenced")

    async def close(self) -> None:
        """End the owner, in any state."""
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            await self._process.wait()

    def last_words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-2_000:]

    def send(self, number: signal.Signals) -> Any:
        """Send a signal to the current process, which runs; returns it."""
        process = self._process
        assert process is not None, "never started"
        assert process.returncode is None, f"{self.name} ended by itself: {self.last_words()}"
        process.send_signal(number)
        return process
