"""A local stack for the demo: started, asked where it is, hurt, and ended without a trace."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

START_SECONDS = 60.0


class StackFailed(Exception):
    """The stack did not start; the message holds what it said."""


class DemoStack:
    """`python -m services` on a temporary folder. A context manager that leaves nothing behind."""

    def __init__(self, keep: bool = False) -> None:
        """Start it later; `keep` leaves the folder."""
        self.folder = Path(tempfile.mkdtemp(prefix="slatemq-demo-"))
        self._keep = keep
        self._ready_file = self.folder / "ready.json"
        self._said = self.folder / "launcher.log"
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The one address that a client needs."""
        return str(self._ready()["endpoint"])

    def kill(self, service: str) -> int:
        """SIGKILL one service, as a crash would; returns the process ID it had."""
        pid = int(self._ready()["pids"][service])
        os.kill(pid, signal.SIGKILL)
        return pid

    def __enter__(self) -> DemoStack:
        command = [sys.executable, "-m", "services", "--data", str(self.folder / "data")]
        with self._said.open("wb") as said:
            # A session of its own: Ctrl-C is for the demo, which then ends the stack.
            self._launcher = subprocess.Popen(
                [*command, "--ready-file", str(self._ready_file)],
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._launcher)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._end()

    def _wait_ready(self, launcher: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_SECONDS
        while not self._ready_file.exists():
            if launcher.poll() is not None or time.monotonic() > end:
                raise StackFailed(f"the stack did not start:\n{self._said.read_text()}")
            time.sleep(0.02)

    def _end(self) -> None:
        if self._launcher is not None and self._launcher.poll() is None:
            self._launcher.send_signal(signal.SIGTERM)
            try:
                self._launcher.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._launcher.kill()  # Its services end with it.
                self._launcher.wait()
        if not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ready(self) -> Any:
        return json.loads(self._ready_file.read_text(encoding="utf-8"))
