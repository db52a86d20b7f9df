"""Processes of ours, loaded before: imports are most of what the start of one takes.

One process for all tests of a run, also where they run side by side, loads what it is asked for
once and then forks. A fork has the streams, arguments, environment and folder that `python -m
MODULE` would have, is watched like a child, and ends as that would. What tests prove of a start
itself, or of memory, needs a process of its own from the beginning; so does everything where the
system cannot do this, which then gets one.

::

    asks ──{"module": …}, streams, reports──► forks ──► guardian ──► runs the module
         ◄────────── process ID, and exit code when it has ended ─────┘

The guardian is the parent of what it forks: it tells the exit code, and ends when who asked is
gone, with which ends what was given `--parent-pid`.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import io
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final, NoReturn

from libs.filters import load_parser

ROOT: Final = Path(__file__).resolve().parents[1]

WHERE: Final = "TESTS_READY_PROCESS"
"""Names the address of the process that forks, also to what it has forked."""

_COULD_NOT: Final = 255
_ASKED_BYTES_MAX: Final = 1 << 17
_FILES: Final = 4
_PARENT: Final = "--parent-pid"

Stream = IO[Any] | int | None


class ReadyProcess:
    """What `subprocess.Popen` gives, of a fork."""

    def __init__(self, reports: IO[bytes], stdin: IO[bytes] | None, stdout: IO[bytes] | None):
        self.stdin, self.stdout = stdin, stdout
        self.returncode: int | None = None
        self._reports = reports
        self.pid = int(reports.readline())

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self.returncode is None and select.select([self._reports], [], [], 0)[0]:
            self._end()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._reports], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self._end()
        assert self.returncode is not None
        return self.returncode

    async def ended(self) -> int:
        """The same, while the event loop goes on."""
        loop, end = asyncio.get_running_loop(), asyncio.Event()
        if self.poll() is None:
            loop.add_reader(self._reports, end.set)
            try:
                await end.wait()
            finally:
                loop.remove_reader(self._reports)
        return self.wait()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self.returncode = int(self._reports.readline() or _COULD_NOT)
        self._reports.close()


class AwaitedProcess:
    """What `asyncio.create_subprocess_exec` gives, of a fork whose streams are not read."""

    def __init__(self, process: ReadyProcess) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    async def wait(self) -> int:
        return await self._process.ended()

    def send_signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()


def popen(
    command: Sequence[str],
    *,
    stdin: Stream = None,
    stdout: Stream = None,
    stderr: Stream = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    process_group: int | None = None,
    start_new_session: bool = False,
    file_bytes_max: int | None = None,
) -> Any:
    """The same as `subprocess.Popen` of `python -m MODULE …`.

    No file that a fork writes can become larger than `file_bytes_max`, from its beginning on.
    """
    if not hasattr(os, "pidfd_open"):
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            cwd=cwd,
            process_group=process_group,
            start_new_session=start_new_session,
        )
    python, option, module, *arguments = command
    assert (python, option) == (sys.executable, "-m")
    asked = {
        "module": module,
        "arguments": arguments,
        "environ": dict(os.environ if env is None else env) | {WHERE: _where()},
        "folder": str(cwd or Path.cwd()),
        "owner": os.getpid(),
        "group": process_group is not None,
        "session": start_new_session,
        "file_bytes_max": file_bytes_max,
    }
    result, reports = os.pipe()
    given, theirs, ours = [], [reports], []
    for number, stream in enumerate((stdin, stdout, stderr)):
        own, its = _stream(number, stream)
        ours.append(own)
        given.append(its)
        if stream in (subprocess.PIPE, subprocess.DEVNULL):
            theirs.append(its)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(f"\0{_where()}")
        socket.send_fds(asking, [json.dumps(asked).encode()], [*given, reports])
    for file in theirs:
        os.close(file)
    return ReadyProcess(os.fdopen(result, "rb", buffering=0), ours[0], ours[1])


async def create_subprocess(*command: str, **streams: Any) -> Any:
    """The same as `asyncio.create_subprocess_exec` of `python -m MODULE …`, but for its streams."""
    if not hasattr(os, "pidfd_open"):
        return await asyncio.create_subprocess_exec(*command, **streams)
    # In a thread: the first use of a module waits until it is loaded.
    return AwaitedProcess(await asyncio.to_thread(popen, command, **streams))


def _stream(number: int, stream: Stream) -> tuple[IO[bytes] | None, int]:
    """Our end of a pipe, if it is to be one, and what the fork gets."""
    if stream is None:
        return None, number
    if stream == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if stream != subprocess.PIPE:
        return None, stream if isinstance(stream, int) else stream.fileno()
    reading, writing = os.pipe()
    if number == 0:
        return os.fdopen(writing, "wb"), reading
    return os.fdopen(reading, "rb"), writing


def begin_for_all() -> None:
    """Begin it for all processes that this one starts from now on: loading takes seconds."""
    if hasattr(os, "pidfd_open"):
        os.environ[WHERE] = _where()


_starting = threading.Lock()


def _where() -> str:
    """The address of the process that forks; begins it where there is none."""
    with _starting:
        return os.environ.get(WHERE) or _begun()


@cache
def _begun() -> str:
    """Begin it; it ends when its stdin does."""
    where = f"slatemq-tests-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(f"\0{where}")
        listening.listen(socket.SOMAXCONN)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.ready_process", str(listening.fileno())],
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            pass_fds=[listening.fileno()],
        )
    assert process.stdin is not None
    stdin = process.stdin

    def end() -> None:
        stdin.close()
        process.wait()

    atexit.register(end)
    return where


# --- The process that forks -------------------------------------------------


def serve(listening: socket.socket) -> Mapping[str, Any] | None:
    """Fork for each that asks; gives what was asked in the fork that does it, else None."""
    while True:
        ready, _, _ = select.select([listening.fileno(), 0], [], [])
        if 0 in ready:
            return None
        asking, _ = listening.accept()
        message, files, _, _ = socket.recv_fds(asking, _ASKED_BYTES_MAX, _FILES)
        asking.close()
        asked = json.loads(message)
        _load(asked["module"])
        if os.fork() == 0:
            listening.close()
            _guard(asked, files)
            return asked  # type: ignore[no-any-return]
        for file in files:
            os.close(file)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


@cache
def _load(module: str) -> None:
    """Load what a module needs; one that has `load` knows what else it needs later."""
    loaded = import_module(_main_of(module))
    getattr(loaded, "load", lambda: None)()
    load_parser()  # Most of what the start of a broker or a router takes.
    assert threading.active_count() == 1, f"{module} begins threads that a fork would lose"
    gc.collect()
    gc.freeze()


def _main_of(module: str) -> str:
    found = import_module(module)
    return f"{module}.__main__" if hasattr(found, "__path__") else module


def _guard(asked: Mapping[str, Any], files: Sequence[int]) -> None:
    """Fork once more; returns in the fork. The parent of it waits, tells its end, and ends."""
    *streams, reports = files
    owner: int | None = None
    with suppress(ProcessLookupError):
        owner = os.pidfd_open(asked["owner"])
    pid = os.fork()
    if pid == 0:
        if owner is not None:
            os.close(owner)
        _become(asked, streams, reports)
        return
    for file in (0, 1, 2, *streams):
        os.close(file)
    its = os.pidfd_open(pid)
    watched = [its] if owner is None or _PARENT not in asked["arguments"] else [its, owner]
    if its in select.select(watched, [], [])[0]:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):
            os.write(reports, b"%d\n" % code)
    os._exit(0)


def _become(asked: Mapping[str, Any], streams: Sequence[int], reports: int) -> None:
    """Be what was asked for, with its streams, and say so."""
    if asked["session"]:
        os.setsid()
    elif asked["group"]:
        os.setpgid(0, 0)
    if (bytes_max := asked["file_bytes_max"]) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_max, resource.RLIM_INFINITY))
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    arguments = list(asked["arguments"])
    if _PARENT in arguments:
        arguments[arguments.index(_PARENT) + 1] = str(os.getppid())
    sys.argv = [asked["module"], *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        binary = open(number, "rb" if name == "stdin" else "wb", closefd=False)  # noqa: SIM115
        made = io.TextIOWrapper(
            binary, stream.encoding, stream.errors, line_buffering=name == "stderr"
        )
        setattr(sys, name, made)
    os.write(reports, b"%d\n" % os.getpid())
    os.close(reports)


def _end(code: Any) -> NoReturn:
    """End as the interpreter would, but for its objects: taking them apart copies all pages that a
    fork shares with the others, which is most of what a short command takes."""
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):  # It may be closed, or gone.
            stream.flush()
    os._exit((code or 0) & 0xFF)


def main() -> None:
    """Ready to fork; it ends without a word at Ctrl-C, and when its stdin does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        module = _main_of(asked["module"])
        del sys.modules[module]  # or runpy warns that it is there already
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            _end(end.code)
        _end(0)


if __name__ == "__main__":
    main()
