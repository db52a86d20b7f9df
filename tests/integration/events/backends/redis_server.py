"""A Redis of one's own that writes each command to disk before it answers."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from libs.events.settings import RedisSettings
from tests.integration.events.backends.servers import (
    Certificate,
    PortServer,
    Process,
    program,
)
from tests.ports import free_ports


class RedisServer(PortServer):
    """redis-server with an append-only file."""

    def __init__(
        self,
        folder: Path,
        task_structure: Literal["streams", "lists"],
        certificate: Certificate | None = None,
        asks_clients: bool = False,
        options: Sequence[str] = (),
    ) -> None:
        """Nothing runs yet. With a certificate it speaks TLS alone.

        `asks_clients`: it takes clients alone whose certificate that one has signed.
        `options`: more of its command line.
        """
        (self.port,) = free_ports(1)
        self._task_structure = task_structure
        self._is_encrypted = certificate is not None
        ports = ["--port", str(self.port)]
        if certificate is not None:
            ports = ["--port", "0", "--tls-port", str(self.port)]
            ports += ["--tls-auth-clients", "yes" if asks_clients else "no"]
            ports += ["--tls-ca-cert-file", str(certificate.file)]
            ports += ["--tls-cert-file", str(certificate.file)]
            ports += ["--tls-key-file", str(certificate.key_file)]
        self._process = Process(
            [
                program("redis-server"),
                *("--bind", "127.0.0.1", *ports, "--dir", str(folder)),
                *("--save", "", "--appendonly", "yes", "--appendfsync", "always", *options),
            ],
            folder,
            {},
        )

    def control(self, *command: str) -> str:
        """What `redis-cli` prints."""
        arguments = [program("redis-cli"), "-p", str(self.port), *command]
        done = subprocess.run(arguments, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def settings(self, prefix: str) -> RedisSettings:
        """Settings of a backend on it."""
        return RedisSettings(
            url=f"redis://127.0.0.1:{self.port}",
            stream_prefix=prefix,
            consumer_group=f"{prefix}-workers",
            max_retries=2,
            retry_delay_ms=200,
            task_structure=self._task_structure,
        )

    def _answers(self) -> bool:
        """It accepts connections, and refuses commands, while it reads its file."""
        if self._is_encrypted:
            return super()._answers()
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False
