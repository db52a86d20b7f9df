"""One service's process through its restarts.

::

    starting ──health SERVING──► serving ──┐
       ▲                                   │ died
       └────── wait (backoff) ◄────────────┤
                                           └─► refused: fenced, or a setting is wrong
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from libs.serving.process.exits import EXIT_FENCED, EXIT_USAGE
from services.stack.backoff import Backoff
from services.stack.tail import last_line

HEALTH_LOOK_SECONDS = 0.05
"""Between two questions whether a starting service serves yet."""

HEALTH_DEADLINE_SECONDS = 1.0

HURRIED_SECONDS = 2.0
"""For a service that was told twice to end."""


@dataclass(frozen=True)
class Program:
    """What to run for one service.

    Attributes:
        name: Of the service.
        command: The program and its arguments.
        address: `host:port` where it will answer.
        environ: Its whole environment.
        log: File for its output; None leaves it on this process's stderr.
        http_address: `host:port` of its HTTP port; empty without one.
    """

    name: str
    command: Sequence[str]
    address: str
    environ: Mapping[str, str]
    log: Path | None
    http_address: str = ""


@dataclass(frozen=True)
class _Life:
    """What became of one process: exit code (negative: signal), how long it served, last words."""

    code: int
    served_seconds: float
    words: str


class Supervised:
    """Keeps one service running until told to stop, or until it may not be started again.

    Attributes:
        name: Of the service.
        address: `host:port` where it answers, in every life.
        pid: Of its process; None while there is none.
        serving: Set while it says that it serves.
        restarts_count: How often it was started again.
        refused: Its exit code, once it ended in a way after which it is never started again.
    """

    def __init__(
        self,
        program: Program,
        report: Callable[[str], None],
        on_serving: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        """Prepare; `tell` gets what people should know, `on_serving` is called in every life."""
        self.name = program.name
        self.address = program.address
        self.serving = asyncio.Event()
        self.restarts_count = 0
        self.refused: int | None = None
        self._program = program
        self._report = report
        self._on_serving = on_serving
        self._backoff = backoff or Backoff()
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """ID of its process now."""
        return self._process.pid if self._process else None

    def start(self) -> asyncio.Task[None]:
        """Begin to keep it running; the task ends once it was stopped or refused."""
        self._run = asyncio.create_task(self._keep_running())
        return self._run

    async def stop(self, grace_seconds: float, hurry: asyncio.Event) -> bool:
        """Have it drain and end; kill it after the grace. Returns whether it ended by itself.

        `hurry`, set before or meanwhile, tells it to end its calls at once.
        """
        self._stopping.set()
        if self._run is None or self._run.done():
            return True
        self._signal(signal.SIGTERM)
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait(
            [self._run, hurried], timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if hurried.done() and not self._run.done():
            self._signal(signal.SIGTERM)
            await asyncio.wait([self._run], timeout=HURRIED_SECONDS)
        hurried.cancel()
        if self._run.done():
            return True
        self._report(f"{self.name} did not end in time and is killed")
        self._signal(signal.SIGKILL)
        await asyncio.wait([self._run])
        return False

    async def _keep_running(self) -> None:
        while not self._stopping.is_set():
            life = await self._live(again=self.restarts_count > 0)
            if self._stopping.is_set():
                return
            if life.code in (EXIT_FENCED, EXIT_USAGE):
                self.refused = life.code
                self._report(f"{self.name} {_end_of(life.code)}; not starting it again{life.words}")
                return
            self.restarts_count += 1
            wait = self._backoff.after(life.served_seconds)
            self._report(
                f"{self.name} {_end_of(life.code)}; starting it again in {wait:g} s{life.words}"
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait)

    async def _live(self, again: bool) -> _Life:
        """Start it once, and wait for its end."""
        log = self._program.log
        offset = log.stat().st_size if log is not None and log.exists() else 0
        self._process = await self._spawn(log)
        if self._stopping.is_set():  # Told so while there was no process to tell.
            self._signal(signal.SIGTERM)
        looking = asyncio.create_task(self._look(again))
        code = await self._process.wait()
        looking.cancel()
        await asyncio.wait([looking])
        self._process = None
        self.serving.clear()
        since = None if looking.cancelled() else looking.result()
        words = last_line(log, offset) if code > 0 else ""
        return _Life(
            code,
            0.0 if since is None else time.monotonic() - since,
            f"\n    {words}" if words else "",
        )

    async def _spawn(self, log: Path | None) -> Process:
        # A process group of its own: Ctrl-C is for the supervisor, which tells the others in order.
        out = log.open("ab") if log is not None else nullcontext(sys.stderr)
        with out as stream:
            return await asyncio.create_subprocess_exec(
                *self._program.command,
                env=dict(self._program.environ),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                process_group=0,
            )

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):  # Ended just now, which is what it was for.
                self._process.send_signal(number)

    async def _look(self, again: bool) -> float:
        """Wait until it serves; returns when that was, on the monotonic clock."""
        await until_serving(self.address)
        self.serving.set()
        if again:
            self._report(f"{self.name} is serving again")
        self._on_serving()
        return time.monotonic()


async def until_serving(address: str) -> None:
    """Ask a server for its health until it says SERVING. Never gives up: cancel it."""
    serving = health_pb2.HealthCheckResponse.SERVING
    async with grpc.aio.insecure_channel(address, options=_LOOK_OPTIONS) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                answer = await stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_SECONDS
                )
                if answer.status == serving:
                    return
            except grpc.aio.AioRpcError:
                pass  # Not listening yet.
            await asyncio.sleep(HEALTH_LOOK_SECONDS)


_LOOK_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 100),
    ("grpc.use_local_subchannel_pool", 1),
)


def _end_of(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == EXIT_FENCED:
        return f"was fenced (exit {code}): another process owns its data now"
    if code == EXIT_USAGE:
        return f"refused its settings (exit {code})"
    return f"ended (exit {code})"
