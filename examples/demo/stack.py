"""A local stack for the demo: started, asked where it is, killed in part, and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slatemq import Credentials
from slatemq.cli.access.dev_access import SETTINGS, make_access


class StackFailed(Exception):
    """The stack did not start; the message has its output."""


@contextmanager
def demo_folder(keep: bool) -> Iterator[Path]:
    """A temporary folder, removed at the end unless it is to be kept."""
    folder = Path(tempfile.mkdtemp(prefix="slatemq-demo-"))
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


class DemoStack:
    """`python -m services` in a folder, as a context manager that ends it."""

    def __init__(self, folder: Path, config: Path | None = None, is_secured: bool = False) -> None:
        """`config` is the file with the settings of event queues, if any.

        A secured stack has TLS, and a policy that asks for a token.
        """
        self._folder = folder
        self._config = config
        self._access = folder / "access" if is_secured else None
        self._ready_file = folder / "ready.json"
        self._said = folder / "launcher.log"
        self._launcher: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """The one address that a client needs."""
        return str(self._ready()["endpoint"])

    @property
    def credentials(self) -> Credentials | None:
        """What its clients take to be let in."""
        if self._access is None:
            return None
        return Credentials(ca=self._access / "ca.crt", token_file=self._access / "operator.token")

    def kill(self, service: str) -> int:
        """SIGKILL one service, as a crash would; returns the process ID it had."""
        pid = int(self._ready()["pids"][service])
        os.kill(pid, signal.SIGKILL)
        return pid

    def __enter__(self) -> DemoStack:
        self._folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "services", "--data", str(self._folder / "data")]
        if self._config is not None:
            command += ["--config", str(self._config)]
        environment = dict(os.environ)
        if self._access is not None:
            make_access(self._access)
            environment |= {name: str(self._access / file) for name, file in SETTINGS.items()}
        with self._said.open("wb") as said:
            # A session of its own: Ctrl-C is for the demo, which then ends the stack.
            self._launcher = subprocess.Popen(
                [*command, "--ready-file", str(self._ready_file)],
                stdout=said,
                stderr=said,
                env=environment,
                start_new_session=True,
            )
        try:
            self._wait_ready(self._launcher)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait_ready(self, launcher: subprocess.Popen[bytes]) -> None:
        # The launcher ends when a service cannot start; a busy machine only takes longer.
        while not self._ready_file.exists():
            if launcher.poll() is not None:
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

    def _ready(self) -> Any:
        return json.loads(self._ready_file.read_text(encoding="utf-8"))
