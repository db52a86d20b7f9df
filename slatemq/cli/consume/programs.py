"""Programs that `slatemq consume --exec` runs, one for each message."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from slatemq._consume.delivered import Received

HEADERS_BYTES_MAX = 100_000
"""Of SLATEMQ_HEADERS: systems limit the values of an environment (Linux: 128 KiB)."""

KILL_SECONDS = 5.0
"""How long after SIGTERM a program is killed."""

NOT_RUN = (126, 127)
"""The exit statuses of shells for a command that cannot be executed, or is not found."""

SIGPIPE_STATUS = 128 + signal.SIGPIPE
"""The exit status of a command that wrote to a pipe without a reader."""

TAIL_BYTES = 4_096
"""The end of a program's stderr that is kept: it says why the program failed."""

WHY_CHARACTERS = 500
"""The end of that which becomes part of the reason."""

LAST_WORDS_S = 0.5
"""How long stderr is read after a program's end, where a process that it started holds it open."""

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")


class Outcome(NamedTuple):
    """The exit status, as shells report it (128 + N: signal N), and a sentence about it."""

    status: int
    why: str


async def check_syntax(command: str) -> None:
    """Raises ValueError with what the shell says of a command that it cannot parse."""
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-n", "-c", command, stdin=asyncio.subprocess.DEVNULL, stderr=PIPE
    )
    _, said = await process.communicate()
    if process.returncode:
        raise ValueError(last_words(said))


async def run_program(command: str, message: Received, queue: str) -> Outcome:
    """Run a shell command with the payload on stdin; if cancelled, end it with all it started.

    Raises OSError when the shell cannot be run.
    """
    stderr = _Stderr()
    try:
        process = await asyncio.create_subprocess_shell(
            command,
            stdin=PIPE,
            stderr=stderr.writing,
            env=_environment(message, queue),
            process_group=0,
        )
    except OSError:
        stderr.close()
        raise
    stderr.begin()
    try:
        await process.communicate(message.payload)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_S):
                await stderr.ended.wait()
    except BaseException:
        await asyncio.shield(_end(process))
        raise
    finally:
        stderr.close()
    status = process.returncode or 0
    if status < 0:
        status, why = 128 - status, f"the command was ended by signal {-status}"
    else:
        why = f"the command ended with exit status {status}"
    said = last_words(bytes(stderr.tail))
    return Outcome(status, f"{why}: {said}" if said else why)


def has_reader_gone() -> bool:
    """Whether stdout, which commands inherit, is a pipe or socket whose reader is gone."""
    stdout = select.poll()
    stdout.register(1, 0)  # Errors and hang-ups are always reported.
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in stdout.poll(0))


def last_words(stderr: bytes) -> str:
    """The end of a program's stderr, on one line, without escape sequences and controls."""
    text = _ESCAPE.sub("", stderr.decode("utf-8", "replace"))
    lines = ("".join(filter(str.isprintable, line)).strip() for line in text.splitlines())
    said = " | ".join(line for line in lines if line)
    return said if len(said) <= WHY_CHARACTERS else "…" + said[-WHY_CHARACTERS:]


class _Stderr:
    """A pipe for a program's stderr, which goes on to our own; its end is kept."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.tail = bytearray()
        self.ended = asyncio.Event()

    def begin(self) -> None:
        """Read, once the program has its end of the pipe."""
        os.close(self.writing)
        self.writing = -1
        asyncio.get_running_loop().add_reader(self._reading, self._read)

    def _read(self) -> None:
        try:
            said = os.read(self._reading, 1 << 16)
        except BlockingIOError:
            return
        if not said:
            asyncio.get_running_loop().remove_reader(self._reading)
            self.ended.set()
            return
        self.tail = (self.tail + said)[-TAIL_BYTES:]
        with suppress(OSError):  # The command continues when our own stderr is closed.
            sys.stderr.buffer.write(said)
            sys.stderr.buffer.flush()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._reading)
        os.close(self._reading)
        if self.writing >= 0:
            os.close(self.writing)


def _environment(message: Received, queue: str) -> Mapping[str, str]:
    environment = {
        **os.environ,
        "SLATEMQ_MESSAGE_ID": str(message.message_id),
        "SLATEMQ_QUEUE": queue,
        "SLATEMQ_ATTEMPTS": str(message.attempts_count),
        "SLATEMQ_HEADERS": json.dumps(dict(message.headers)),
    }
    if len(environment["SLATEMQ_HEADERS"]) > HEADERS_BYTES_MAX:
        del environment["SLATEMQ_HEADERS"]
    return environment


async def _end(process: Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await process.wait()
                return
