"""`python -m services` as tests start it: on a folder of its own, with free ports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from libs.storage.database.roots import open_root
from services.stack.stack import PARTS, STANDBYS
from tests.ports import free_ports
from tests.ready_process import popen

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 300.0
"""On a busy machine; the launcher itself ends where a service cannot start."""

LOOK_SECONDS = 0.02

READY_STACK = "tests.acceptance.ready_stack"


class LocalStack:
    """A running stack. As a context manager it is stopped at the end, and killed if need be.

    Attributes:
        process: The launcher.
        folder: Where the data, the ready file and the launcher's words are.
    """

    def __init__(self, folder: Path, *arguments: str, ready: bool = False) -> None:
        """Start it on `folder`/data, or as `arguments` say, and wait until it serves.

        `ready` starts all its processes as tests.ready_process does, in a third of the time.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._ready_file = folder / "ready.json"
        self._said = folder / "launcher.err"
        begin, module = (popen, READY_STACK) if ready else (subprocess.Popen, "services")
        command = [sys.executable, "-m", module, "--ready-file", str(self._ready_file)]
        with self._said.open("w") as err, (folder / "launcher.out").open("w") as out:
            self.process: Any = begin(
                [*command, *_with_ports(arguments or ("--data", str(folder / "data")))],
                cwd=REPOSITORY,
                stdout=out,
                stderr=err,
            )
        try:
            wait_until(lambda: self._ready_file.exists(), START_SECONDS, self._alive)
        except BaseException:
            self.close()
            raise

    @property
    def root(self) -> str:
        """URL of the folder in which it keeps everything."""
        return str(self._ready()["root"])

    @property
    def endpoint(self) -> str:
        """The one address that clients need."""
        return str(self._ready()["endpoint"])

    @property
    def endpoints(self) -> dict[str, str]:
        """Address by service."""
        return dict(self._ready()["endpoints"])

    @property
    def http_endpoints(self) -> dict[str, str]:
        """Address of the HTTP port by service, with `--http-ports`."""
        return dict(self._ready()["http_endpoints"])

    @property
    def console(self) -> str:
        """URL of its pages for people."""
        return str(self._ready()["console"])

    @property
    def pids(self) -> dict[str, int]:
        """Process ID by service, and of the launcher."""
        return dict(self._ready()["pids"])

    @property
    def said(self) -> str:
        """What the launcher has printed so far, on both streams."""
        return (self.folder / "launcher.out").read_text() + self._said.read_text()

    def signal(self, service: str, number: signal.Signals) -> int:
        """Send a signal to one service; returns its process ID."""
        pid = self.pids[service]
        os.kill(pid, number)
        return pid

    def wait_restarted(self, service: str, old_pid: int, seconds: float = START_SECONDS) -> None:
        """Wait until another process serves in the place of that one."""
        wait_until(lambda: self.pids[service] not in (old_pid, None), seconds, self._alive)

    def terminate(self) -> int:
        """Ask it to stop, and wait; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return int(self.process.wait(timeout=60))

    def close(self) -> None:
        """Stop it, in any state."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> LocalStack:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _alive(self) -> None:
        assert self.process.poll() is None, f"the launcher ended:\n{self.said}"

    def _ready(self) -> Any:
        return json.loads(self._ready_file.read_text())


def _with_ports(arguments: tuple[str, ...]) -> list[str]:
    """Arguments that name ports: those that a launcher chooses another one may choose, too, until
    services listen there."""
    given = list(arguments)
    if "--ports" not in given:
        given += ["--ports", _ports()]
    if "--http-ports" in given and given[place := given.index("--http-ports") + 1] == "0":
        given[place] = _ports()
    return given


def _ports() -> str:
    return str(free_ports(len(PARTS) + len(STANDBYS)).start)


def wait_until(come_about: Any, seconds: float, check: Any = lambda: None) -> None:
    """Look until something has come about; `check` may end the wait by raising."""
    end = time.monotonic() + seconds
    while not come_about():
        check()
        assert time.monotonic() < end, f"it has not come about in {seconds:g} s"
        time.sleep(LOOK_SECONDS)


def is_running(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


async def peer_address(stack: LocalStack, service: str) -> str:
    """Where the other services reach one: its address in the topology."""
    data = await open_root(stack.root).objects.get(f"topology/{service}-0.json")
    return str(json.loads(data)["peer_address"])
