"""The process in which a run has its Spark: started for it, and gone with it.

::

    janitor ──stdin──► {"job": …}   cancel   (end of file: the janitor is gone)
            ◄─stdout── {"progress": …}   {"requests": …}   {"snapshot": …}   {"end": "done", …}

The child leads a process group of its own, with its JVM in it; killing the group ends both. A JVM
that has lost its child ends by its own stdin, and removes its files: only what does not end in time
is killed. When the janitor dies, however it does, the child's stdin ends, and it kills its group
itself (`worker`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from subprocess import PIPE, Popen
from typing import Any, Final

from services.janitor.runs.folders import run_folders

log = logging.getLogger(__name__)

CANCEL_S: Final = 5.0
"""How long a cancelled child may take to release its snapshots; then it is killed."""

EXIT_S: Final = 10.0
"""How long it may take after its last word to stop Spark, and Java to end: it removes its files."""

EXIT_LOOK_S: Final = 0.05

LINE_BYTES_MAX: Final = 16 << 20
"""A result names what was written: some hundred bytes for each file."""


class Child:
    def __init__(self, command: Sequence[str], report: Callable[[Mapping[str, Any]], None]) -> None:
        """`report` gets the messages of the child before its last one."""
        self._command = command
        self._report = report
        self._process: Popen[bytes] | None = None
        self._cancelled = False
        self._has_task = False

    async def work(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have it do a task; returns its last message, when it and its Spark are gone.

        `{"end": "lost", …}` stands for a last message that never came. Raises OSError where the
        child cannot be started, or has nowhere to put temporary files.
        """
        # One thread: it goes on when this is cancelled, and makes folders before it removes them.
        folders, thread = ExitStack(), ThreadPoolExecutor(1, "run folders")
        run_in_thread = partial(asyncio.get_running_loop().run_in_executor, thread)
        try:
            variables = await run_in_thread(folders.enter_context, run_folders(os.environ))
            if self._cancelled:
                return {"end": "cancelled"}
            return await self._work(task, variables)
        finally:
            removed = run_in_thread(folders.close)
            thread.shutdown(wait=False)
            await asyncio.shield(removed)

    async def _work(
        self, task: Mapping[str, Any], variables: Mapping[str, str]
    ) -> Mapping[str, Any]:
        self._process = process = self._start(variables)
        try:
            # In a thread: a long list of messages does not fit a pipe that is not read yet.
            await asyncio.to_thread(self._send, json.dumps(task))
            self._has_task = True
            if self._cancelled:
                self.cancel()
            end = await self._listen(process)
            await _group_ended(process)
        finally:
            await asyncio.shield(_end(process))
        return end or {"end": "lost", "error": f"Spark's process ended ({process.returncode})"}

    def cancel(self) -> None:
        """Ask it to end; it is killed when it does not in time."""
        self._cancelled = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._has_task:  # Before, it would take this for its task; `work` sends it then.
            self._send("cancel")
        asyncio.get_running_loop().call_later(CANCEL_S, _kill_late, process)

    def _start(self, variables: Mapping[str, str]) -> Popen[bytes]:
        # Not the event loop's own way: uvloop forks, and what gRPC and the store's client have
        # registered for forks then breaks the child. Popen does not, and runs none of it.
        environ = {**os.environ, **variables}
        return Popen(self._command, stdin=PIPE, stdout=PIPE, env=environ, start_new_session=True)

    def _send(self, line: str) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        # Its end closes the pipe, and is reported by its last message, or the lack of one.
        with suppress(BrokenPipeError, ValueError):
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    async def _listen(self, process: Popen[bytes]) -> Mapping[str, Any] | None:
        assert process.stdout is not None
        # In a thread: an event loop that watches the pipe would close its number itself, and later,
        # when it may be the number of another file.
        while line := await asyncio.to_thread(process.stdout.readline, LINE_BYTES_MAX):
            try:
                fields = json.loads(line)
            except ValueError:
                log.warning("ignoring what is not a message of Spark's process: %r", line[:200])
                continue
            if "end" in fields:
                return dict(fields)
            self._report(fields)
        return None


async def _ended(process: Popen[bytes]) -> None:
    while process.poll() is None:  # noqa: ASYNC110 - no event says so, and it is about to end
        await asyncio.sleep(EXIT_LOOK_S)


async def _group_ended(process: Popen[bytes]) -> None:
    """Wait for EXIT_S at most until the child has ended with all of its group."""
    with suppress(TimeoutError):
        async with asyncio.timeout(EXIT_S):
            while process.poll() is None or _is_left(process.pid):  # noqa: ASYNC110 - as above
                await asyncio.sleep(EXIT_LOOK_S)


def _is_left(group: int) -> bool:
    """Whether there are processes of a group whose first one has ended.

    Those that have lost their parent are children of this process where it is the first one of a
    container; nothing else would reap them.
    """
    with suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


async def _end(process: Popen[bytes]) -> None:
    """Kill what there still is of the child and its group."""
    _kill(process)
    await _ended(process)
    await _group_ended(process)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


def _kill(process: Popen[bytes]) -> None:
    """Kill the child with all of its group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _kill_late(process: Popen[bytes]) -> None:
    """Kill a child that has not ended: later its number may be of another process."""
    if process.returncode is None:
        _kill(process)
