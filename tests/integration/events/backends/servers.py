"""The real servers of backends, each on ports and a folder of its own, killed and restarted."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pytest

START_S = 90.0
RABBITMQ_HOME = Path("/usr/lib/rabbitmq/bin")


class Server(Protocol):
    """A server that can be killed and started again on what it had.

    Attributes:
        settle_s: How long after its creation a queue is lost when the server is killed.
    """

    settle_s: float

    def settings(self, prefix: str) -> Any:
        """Settings of a backend on it, whose names begin with `prefix`."""

    def start(self) -> None:
        """Start, and wait until it answers."""

    def kill(self) -> None:
        """SIGKILL it."""

    def close(self) -> None:
        """End it with all that it needs."""


@runtime_checkable
class PreparedServer(Protocol):
    """A server on which what a backend needs is made before it connects."""

    def prepare(self, *sections: Any) -> None:
        """Make what backends with these settings need."""


def missing(what: str) -> None:
    """Skip a test whose server is not installed; in CI fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"{what} is not installed")
    pytest.skip(f"{what} is not installed")


def program(name: str, *folders: Path) -> str:
    """Path of an installed program, or skips."""
    found = shutil.which(name, path=os.pathsep.join([*map(str, folders), os.environ["PATH"]]))
    if found is None:
        missing(name)
    assert found is not None
    return found


class Certificate:
    """A certificate of 127.0.0.1 that signs itself, and its key: files in PEM."""

    def __init__(self, folder: Path) -> None:
        """Make them."""
        self.file, self.key_file = folder / "certificate.pem", folder / "key.pem"
        command = [
            program("openssl"),
            *["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"],
        ]
        command += ["-keyout", str(self.key_file), "-out", str(self.file)]
        command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
        subprocess.run(command, check=True, capture_output=True)


class Process:
    """One server process, and its log."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        environment: dict[str, str],
        log: Path | None = None,
        begin: Callable[..., Any] = subprocess.Popen,
    ) -> None:
        """Nothing runs yet; `begin` starts it, as subprocess.Popen does."""
        self._begin = begin
        self._log = log or folder / "server.log"
        self._command = command
        self._folder = folder
        self._environment = environment
        self._process: Any = None

    def start(self, answers: Callable[[], bool]) -> None:
        """Start it, and wait until `answers`."""
        with self._log.open("ab") as log:
            self._process = self._begin(
                self._command,
                cwd=self._folder,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_S
        while not answers():
            said = self._log.read_text(errors="replace")[-2_000:]
            assert self._process.poll() is None, f"{self._command[0]} ended:\n{said}"
            assert time.monotonic() < end, f"{self._command[0]} does not answer:\n{said}"
            time.sleep(0.05)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it and all that it started."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """SIGKILL it and all that it started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


def listens(port: int) -> bool:
    """Whether something accepts connections at a port of loopback."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


class PortServer:
    """A server of one process, which listens at a port of loopback."""

    settle_s = 0.0
    port: int
    _process: Process

    def start(self) -> None:
        """Start, and wait until it answers."""
        self._process.start(self._answers)

    def _answers(self) -> bool:
        return listens(self.port)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """SIGSTOP it meanwhile: connections stay open, and nothing answers."""
        self._process.send(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL it and all that it started."""
        self._process.kill()

    def close(self) -> None:
        """SIGKILL it."""
        self.kill()


@contextlib.contextmanager
def running(server: Any) -> Iterator[Any]:
    """The server, started; killed at the end."""
    try:
        server.start()
        yield server
    finally:
        server.close()
