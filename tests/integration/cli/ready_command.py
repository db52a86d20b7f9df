"""The command `slatemq`, loaded before: that is most of the time that a short one takes.

One process loads it, and what commands load late, and forks for each command line. The fork has the
streams, environment and folder that a process of its own would have, and ends as that would. What
tests start, signal or time is a process of its own from the beginning.
"""

from __future__ import annotations

import atexit
import gc
import io
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

import slatemq.cli

MODULE: Final = "tests.integration.cli.ready_command"
ROOT: Final = Path(__file__).resolve().parents[3]

_LOADED_LATE: Final = ("slatemq.client", "slatemq.sync", "rich.console", "rich.table")
_NO_COMMANDS: Final = ("__main__", "windows_lines")

_ASKED_BYTES_MAX: Final = 1 << 17
_FILES: Final = 4


def run(
    arguments: Sequence[str | bytes], environ: Mapping[str, str], stdin: bytes, seconds: float
) -> subprocess.CompletedProcess[bytes]:
    """The same as `subprocess.run` of the command, with its output captured."""
    words = [os.fsdecode(one) for one in arguments]
    asked = {"arguments": words, "environ": dict(environ), "folder": str(Path.cwd())}
    given, giving = os.pipe()
    result, telling = os.pipe()
    writer = threading.Thread(target=_give, args=(os.fdopen(giving, "wb"), stdin))
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        os.fdopen(result) as ends,
    ):
        files = [given, out.fileno(), err.fileno(), telling]
        socket.send_fds(_forking(), [json.dumps(asked).encode()], files)
        os.close(given)
        os.close(telling)
        writer.start()
        late = threading.Timer(seconds, os.kill, (int(ends.readline()), signal.SIGKILL))
        late.start()
        code = int(ends.readline())
        late.cancel()
        late.join()
        writer.join()
        if code == -signal.SIGKILL:
            raise subprocess.TimeoutExpired(words, seconds)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(words, code, out.read(), err.read())


def _give(giving: BinaryIO, stdin: bytes) -> None:
    with suppress(BrokenPipeError), giving:
        giving.write(stdin)


@cache
def _forking() -> socket.socket:
    """What the process that forks is asked through; it ends when this end is closed."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        started = subprocess.Popen(
            [sys.executable, "-m", MODULE, str(its.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[its.fileno()],
        )

    def end() -> None:
        ours.close()
        started.wait()

    atexit.register(end)
    return ours


def serve(asking: socket.socket) -> dict[str, Any] | None:
    """Fork for each command line; gives what was asked in the fork that does it, else None."""
    while True:
        message, files, _, _ = socket.recv_fds(asking, _ASKED_BYTES_MAX, _FILES)
        if not message:
            return None
        if os.fork() == 0:
            asking.close()
            return _begin(json.loads(message), files)
        for file in files:
            os.close(file)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _begin(asked: dict[str, Any], files: Sequence[int]) -> dict[str, Any]:
    """Fork once more: one waits and tells how the other ends, which gets its streams."""
    *streams, telling = files
    pid = os.fork()
    if pid:
        for file in streams:
            os.close(file)
        os.write(telling, b"%d\n" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(telling, b"%d\n" % code)
        os._exit(0)
    os.close(telling)
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    return asked


def become(asked: Mapping[str, Any]) -> None:
    """Be the command, in what it was given."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environ"])
    sys.argv = [sys.argv[0], *asked["arguments"]]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        binary = open(number, "rb" if name == "stdin" else "wb", closefd=False)  # noqa: SIM115
        made = io.TextIOWrapper(
            binary, stream.encoding, stream.errors, line_buffering=name == "stderr"
        )
        setattr(sys, name, made)
    slatemq.cli.main()


def load() -> None:
    """Load every command and what they load late; no thread may begin that a fork would lose."""
    names = [module.name for module in pkgutil.iter_modules(slatemq.cli.__path__)]
    for name in (
        *(f"slatemq.cli.{name}" for name in names if name not in _NO_COMMANDS),
        *_LOADED_LATE,
    ):
        import_module(name)
    assert threading.active_count() == 1


def main() -> None:
    """Ready to fork; the process itself ends without a word at Ctrl-C, as it is not the command."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    load()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        become(asked)


if __name__ == "__main__":
    main()
