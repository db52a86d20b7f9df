"""What every start of a service would pay for, and few need."""

from __future__ import annotations

import subprocess
import sys

SERVICES = ("broker", "ingest", "janitor", "router")

LOADED_WHEN_NEEDED = {
    "aio_pika", "aiohttp", "aiokafka", "opentelemetry.exporter", "opentelemetry.sdk",
    "prometheus_client", "pyspark", "redis", "yaml",
}  # fmt: skip


def test_a_start_loads_only_what_every_process_needs() -> None:
    modules = ", ".join(f"services.{name}.service" for name in SERVICES)
    result = subprocess.run(
        [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert not LOADED_WHEN_NEEDED & set(result.stdout.split())
