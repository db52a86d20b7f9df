"""A RabbitMQ node of one's own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from libs.events.settings import RabbitmqSettings
from tests.integration.events.backends.servers import (
    RABBITMQ_HOME,
    Certificate,
    PortServer,
    Process,
    program,
)
from tests.ports import free_ports


class RabbitmqServer(PortServer):
    """rabbitmq-server with its data in a folder."""

    # RabbitMQ 3.10 writes the names of quorum queues behind: one that was made just before a kill
    # exists afterwards, but never answers.
    settle_s = 8.0

    def __init__(self, folder: Path, *plugins: str, certificate: Certificate | None = None) -> None:
        """Nothing runs yet. With a certificate it speaks TLS, too, at `tls_port`."""
        self.certificate = certificate
        self.port, self.tls_port, self._dist_port = free_ports(3)
        enabled = folder / "enabled_plugins"
        enabled.write_text(f"[{','.join(plugins)}].\n")
        config = folder / "rabbitmq.conf"
        lines = [f"listeners.tcp.1 = 127.0.0.1:{self.port}"]
        if certificate is not None:
            lines += [
                f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}",
                f"ssl_options.certfile = {certificate.file}",
                f"ssl_options.keyfile = {certificate.key_file}",
            ]
        config.write_text("\n".join([*lines, ""]))
        self._node = f"events{self.port}@localhost"
        self._environment = {
            "HOME": str(folder),
            "RABBITMQ_CONFIG_FILE": str(config),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(enabled),
            "RABBITMQ_NODENAME": self._node,
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        # Before Debian's wrapper on the PATH.
        command = [program("rabbitmq-server", RABBITMQ_HOME)]
        self._process = Process(command, folder, self._environment)

    def control(self, *command: str) -> None:
        """Run `rabbitmqctl`."""
        subprocess.run(
            [program("rabbitmqctl", RABBITMQ_HOME), "-q", "-n", self._node, *command],
            env={**os.environ, **self._environment},
            check=True,
            capture_output=True,
        )

    @contextlib.contextmanager
    def disk_alarm(self) -> Iterator[None]:
        """Let its disk seem full meanwhile: it blocks the connections that publish."""
        self.control("set_disk_free_limit", str(10**18))
        try:
            yield
        finally:
            self.control("set_disk_free_limit", "1000")

    def settings(self, prefix: str) -> RabbitmqSettings:
        """Settings of a backend on it."""
        return RabbitmqSettings(
            url=f"amqp://guest:guest@127.0.0.1:{self.port}/",
            exchange=prefix,
            queue_prefix=prefix,
            max_retries=2,
            retry_delay_ms=200,
        )
