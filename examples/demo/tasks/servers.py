"""The queue backend of the demo: a server that is killed, and started again on what it had."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

from examples.demo.stack import DemoStack, StackFailed
from services.stack.ports import HOST, choose_ports

START_SECONDS = 20.0


class TaskServer(Protocol):
    """What `queue.backend` names, as a context manager that ends it."""

    @property
    def settings(self) -> dict[str, Any]:
        """The backend's section of the settings."""

    def kill(self) -> int:
        """SIGKILL it; returns the process ID it had."""

    def revive(self) -> None:
        """Start it again, on what it had."""

    def __enter__(self) -> TaskServer: ...

    def __exit__(self, *_: object) -> None: ...


class RedisServer:
    """A redis-server of the demo's own, which writes each command to disk before it answers."""

    def __init__(self, folder: Path) -> None:
        """Start it later."""
        folder.mkdir()
        self._port = choose_ports(None, ["redis"])["redis"]
        self._said = folder / "redis.log"
        self._command = [
            *("redis-server", "--bind", HOST, "--port", str(self._port), "--dir", str(folder)),
            *("--save", "", "--appendonly", "yes", "--appendfsync", "always"),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """See TaskServer."""
        return {"url": f"redis://{HOST}:{self._port}"}

    def kill(self) -> int:
        """See TaskServer."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return self._process.pid

    def revive(self) -> None:
        """See TaskServer."""
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(
                self._command, stdout=said, stderr=said, start_new_session=True
            )
        end = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                raise StackFailed(f"redis-server did not start:\n{self._said.read_text()}")
            time.sleep(0.02)

    def __enter__(self) -> RedisServer:
        try:
            self.revive()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    def _answers(self) -> bool:
        try:
            with socket.create_connection((HOST, self._port), timeout=1) as asked:
                asked.sendall(b"PING\r\n")
                return asked.recv(16) == b"+PONG\r\n"
        except OSError:
            return False


class SlatemqServer:
    """Another stack, whose ingest is killed; its launcher starts it again."""

    def __init__(self, folder: Path) -> None:
        """Start it later."""
        self._stack = DemoStack(folder)

    @property
    def settings(self) -> dict[str, Any]:
        """See TaskServer."""
        return {"endpoint": self._stack.endpoint}

    def kill(self) -> int:
        """See TaskServer."""
        return self._stack.kill("ingest")

    def revive(self) -> None:
        """See TaskServer: the launcher does it."""

    def __enter__(self) -> SlatemqServer:
        self._stack.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.__exit__(*_)
