"""SlateMQ as the backend: the whole stack, which is killed at once."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from libs.events.settings import SlatemqSettings
from services.stack.ports import is_free
from services.stack.stack import PARTS
from tests.acceptance.local_stack import READY_STACK, REPOSITORY
from tests.integration.events.backends.servers import PortServer, Process
from tests.ports import free_ports
from tests.ready_process import popen


class SlatemqServer(PortServer):
    """`python -m services` on a folder."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        """Nothing runs yet; `arguments` are those of the stack."""
        self._folder = folder
        self._ready = folder / "ready.json"
        self._ports = free_ports(len(PARTS))
        self.port = self._ports.start
        self._process = Process(
            [
                *(sys.executable, "-m", READY_STACK, "--data", str(folder / "data")),
                *("--ready-file", str(self._ready), "--ports", str(self.port)),
                *arguments,
            ],
            REPOSITORY,
            {},
            log=folder / "server.log",
            begin=popen,
        )

    def settings(self, prefix: str) -> SlatemqSettings:
        """Settings of a backend on it."""
        return SlatemqSettings(
            endpoint=str(json.loads(self._ready.read_text())["endpoint"]),
            queue_prefix=prefix,
            consumer_group=f"{prefix}-workers",
            max_retries=2,
            retry_delay_ms=200,
        )

    def start(self) -> None:
        """Start, and wait until all of it serves."""
        self._ready.unlink(missing_ok=True)
        self._process.start(self._ready.exists)

    def kill(self) -> None:
        """SIGKILL it, and wait for its services, which end with their launcher, but after it."""
        super().kill()
        while not all(map(is_free, self._ports)):
            time.sleep(0.05)
