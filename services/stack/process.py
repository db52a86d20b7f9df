"""One service's process through its restarts.

::

    starting ──health SERVING──► serving ──┐
       ▲                                   │ died
       └────── wait (backoff) ◄────────────┤
                                           └─► refused: fenced, exit code 2, or it has
                                               never served in STARTS_MAX lives, those aside
                                               that the store was down in

One that stands by serves, or waits for its shard, and is started again when it was fenced.
"""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

from libs.serving.process.exits import EXIT_FAILED, EXIT_FENCED, EXIT_STORE_DOWN, EXIT_USAGE
from libs.serving.process.healthprobe import NO_TLS, probe, probe_answers, probe_pages, tls_files

STARTS_MAX = 10
"""A service that ends this often before it has ever served will not serve. Lives are counted, not
seconds: one that is slow, since the machine is busy or it has much to read, is left alone."""

FIRST_SECONDS = 0.2
"""Long enough for the port to be free again; short, since most deaths are single ones."""

LONGEST_SECONDS = 5.0
"""Few restarts for a service that keeps dying, and it is back soon after the cause is gone."""

HEALTHY_SECONDS = 60.0
"""After serving for this long, the next death counts as a first one."""

HEALTH_LOOK_SECONDS = 0.05
"""Between two questions whether a starting service serves yet."""

HURRIED_SECONDS = 2.0
"""For a service that was asked twice to end."""

TAIL_BYTES = 8_192

_RECORD = re.compile(r'^(?=\d{4}-\d\d-\d\dT[\d:.]+Z |\{")', re.MULTILINE)
"""Where a record of a log begins: with its time, or as a JSON object."""

_EXIT_CODE = re.compile(r' exit_code=\d+$|"exit_code": \d+[,}].*$', re.MULTILINE)
"""The end of the record of why a process ended: see `ExitCause.log`."""


@dataclass
class Backoff:
    """The wait before a restart, in seconds: doubles until a death comes after a healthy minute."""

    first: float = FIRST_SECONDS
    longest: float = LONGEST_SECONDS
    healthy: float = HEALTHY_SECONDS
    _next: float = 0.0

    def after(self, served_seconds: float) -> float:
        """The wait after a death that came `served_seconds` after the service began to serve."""
        if served_seconds >= self.healthy or self._next == 0.0:
            self._next = self.first
        wait = self._next
        self._next = min(self.longest, wait * 2)
        return wait


@dataclass(frozen=True)
class Program:
    """What to run for one service.

    Attributes:
        address: `host:port` where it will answer.
        environ: Its whole environment.
        log: File for its output; None leaves it on this process's stderr.
        http_address: `host:port` of its HTTP port; empty without one.
        has_pages: Whether it answers with pages in place of gRPC.
        stands_by: Whether it waits while another process owns its shard.
    """

    name: str
    command: Sequence[str]
    address: str
    environ: Mapping[str, str]
    log: Path | None
    http_address: str = ""
    has_pages: bool = False
    stands_by: bool = False


class Supervised:
    """Keeps one service running until it is stopped or refused.

    Attributes:
        address: `host:port` where it answers, in every life.
        serving: Set while it says that it serves; of one that stands by, while it answers.
        refused: Its exit code, once it ended in a way after which it is never started again.
    """

    def __init__(
        self,
        program: Program,
        report: Callable[[str], None],
        on_serving: Callable[[], None],
        backoff: Backoff | None = None,
    ) -> None:
        """`report` prints a line for people; `on_serving` is called in every life."""
        self.name = program.name
        self.address = program.address
        self.serving = asyncio.Event()
        self.refused: int | None = None
        self._program = program
        self._report = report
        self._on_serving = on_serving
        self._backoff = backoff or Backoff()
        self._lives_count = 0
        self._failed_count = 0  # of lives that a store that is down did not end
        self._has_served = False
        self._log_offset = _size(program.log)
        self._stopping = asyncio.Event()
        self._process: Process | None = None
        self._run: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def last_words(self) -> str:
        """What this life has logged last, on lines of its own; empty where it has nothing."""
        return self._words(was_killed=False)

    def _words(self, *, was_killed: bool) -> str:
        words = words_of(self._program.log, self._log_offset, was_killed=was_killed)
        return indent(f"\n{words}", "    ") if words else ""

    def start(self) -> asyncio.Task[None]:
        """Begin to keep it running; the task ends once it was stopped or refused.

        The task raises OSError where it cannot be started, unless it has served before.
        """
        self._run = asyncio.create_task(self._keep_running())
        return self._run

    async def stop(self, grace_seconds: float, hurry: asyncio.Event) -> bool:
        """Have it drain and end; kill it after the grace. Returns whether it ended by itself.

        `hurry`, set before or meanwhile, ends its calls without a grace.
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
            try:
                code, served_seconds = await self._live()
                end = _end_of(code)
            except OSError as error:  # Its log's folder is gone, or there is no memory for it.
                if not self._has_served:
                    raise
                code, served_seconds, end = EXIT_FAILED, 0.0, f"cannot be started: {error}"
            if self._stopping.is_set():
                return
            words = self._words(was_killed=code < 0)
            if code == EXIT_USAGE or (code == EXIT_FENCED and not self._program.stands_by):
                self.refused = code
                self._report(f"{self.name} {end}; not starting it again{words}")
                return
            self._failed_count += code != EXIT_STORE_DOWN
            if not self._has_served and self._failed_count == STARTS_MAX:
                self.refused = EXIT_FAILED
                self._report(f"{self.name} {end}, {STARTS_MAX} times before it served{words}")
                return
            wait = self._backoff.after(served_seconds)
            self._report(f"{self.name} {end}; starting it again in {wait:g} s{words}")
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stopping.wait()

    async def _live(self) -> tuple[int, float]:
        """Start it once, and wait for its end: the exit code, and how long it served, in s.

        Raises OSError where it cannot be started.
        """
        log = self._program.log
        self._log_offset = _size(log)
        self._process = await self._spawn(log)
        self._lives_count += 1
        if self._stopping.is_set():  # Since before there was a process to signal.
            self._signal(signal.SIGTERM)
        looking = asyncio.create_task(self._look())
        code = await self._process.wait()
        looking.cancel()
        await asyncio.wait([looking])
        self._process = None
        self.serving.clear()
        return code, 0.0 if looking.cancelled() else time.monotonic() - looking.result()

    async def _spawn(self, log: Path | None) -> Process:
        # A process group of its own: Ctrl-C is for the supervisor, which stops the others in order.
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
            with suppress(ProcessLookupError):  # It has just ended.
                self._process.send_signal(number)

    async def _look(self) -> float:
        """Wait until it serves; returns when that was, on the monotonic clock."""
        await until_serving(self.address, tls_files(self._program.environ), self._ask)
        self.serving.set()
        self._has_served = True
        if self._lives_count > 1:
            again = "waits as a standby, or serves" if self._program.stands_by else "is serving"
            self._report(f"{self.name} {again} again")
        try:
            self._on_serving()
        except OSError as error:  # The disk is full. The service serves all the same.
            self._report(f"{self.name} is serving, but recording that failed: {error}")
        return time.monotonic()

    @property
    def _ask(self) -> Callable[[str, Mapping[str, str]], str]:
        if self._program.has_pages:
            return probe_pages
        return probe_answers if self._program.stands_by else probe


async def until_serving(
    address: str,
    tls: Mapping[str, str] = NO_TLS,
    ask: Callable[[str, Mapping[str, str]], str] = probe,
) -> None:
    """Ask a server for its health until it says SERVING. Never gives up: cancel it."""
    while await asyncio.to_thread(ask, address, tls):  # noqa: ASYNC110
        await asyncio.sleep(HEALTH_LOOK_SECONDS)


def _size(log: Path | None) -> int:
    return log.stat().st_size if log is not None and log.exists() else 0


def words_of(path: Path | None, since_bytes: int = 0, *, was_killed: bool = False) -> str:
    """What a log says after its first `since_bytes`: why its process ended, else its last line.

    The reason is found whatever was logged beside it, or written by libraries. A process that a
    signal has killed gave none: one that is there is of a process of another stack, whose data this
    one has taken.
    """
    if path is None:
        return ""
    try:
        with path.open("rb") as log:
            end = log.seek(0, 2)
            log.seek(max(since_bytes, end - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError:
        return ""
    for record in () if was_killed else reversed(_RECORD.split(text)):
        if ended := _EXIT_CODE.search(record):
            return record[: ended.end()].strip()
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def _end_of(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code == EXIT_FENCED:
        return f"was fenced (exit {code}): another process owns its data now"
    if code == EXIT_STORE_DOWN:
        return f"cannot use its store (exit {code})"
    if code == EXIT_USAGE:
        return f"refused to start (exit {code})"
    return f"ended (exit {code})"
