"""What a process sends to a collector."""

from __future__ import annotations

import io
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.exporter import logger as exporter_log
from opentelemetry.sdk._shared_internal import DuplicateFilter

from libs.serving.process import logs
from libs.serving.telemetry import configure
from services.broker.metrics import measure
from slatemq.cli.access.dev_certificates import make_certificates
from tests.integration.serving.otlp_collector import OtlpCollector, collecting
from tests.integration.waiting import WAIT_SECONDS, eventually
from tests.unit.broker.core.shards import Rig


@pytest.fixture
def crowded() -> Rig:
    """A shard of 2,500 queues with the longest names."""
    rig = Rig()
    for number in range(2_500):
        rig.create(f"{number:0255}")
    return rig


async def test_a_collector_gets_all_series_of_2_500_queues_with_the_longest_names(
    crowded: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "500")
    names = set(crowded.shard.queues)
    with collecting() as (collector, url):
        telemetry = configure("broker", "host/broker-0", url)
        telemetry.meter.create_counter("a").add(1)
        measure(telemetry, crowded.shard)
        await eventually(lambda: _queues(collector, "slatemq.queue.expired.messages") == names)
        telemetry.shutdown()

    assert _queues(collector, "slatemq.queue.messages") == names


async def test_a_collector_behind_tls_gets_what_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path / "certificates")
    files = {file.name: file for file in (tmp_path / "certificates").iterdir()}
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(files["ca.crt"]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(files["client.crt"]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(files["client.key"]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=secret,tenant=shop")
    own = (files["service.key"].read_bytes(), files["service.crt"].read_bytes())
    tls = grpc.ssl_server_credentials([own], files["ca.crt"].read_bytes(), True)

    with collecting(tls) as (collector, url):
        telemetry = configure("broker", "host/broker-0", url)
        telemetry.meter.create_counter("a").add(1)
        with telemetry.tracer.start_as_current_span("a"):
            pass
        telemetry.shutdown()
        await eventually(lambda: collector.traces and collector.metrics)

    for _, metadata in (*collector.traces, *collector.metrics):
        assert (metadata["api-key"], metadata["tenant"]) == ("secret", "shop")


@pytest.mark.parametrize(("level", "lines"), [("info", 1), ("error", 0)])
def test_what_a_collector_does_not_take_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, level: str, lines: int
) -> None:
    monkeypatch.setattr("libs.serving.telemetry.SHUTDOWN_S", WAIT_SECONDS)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")  # Less than before a second try.
    # Without the SDK's own filter, which lets no line pass that is like the one before.
    own = [one for one in exporter_log.filters if not isinstance(one, DuplicateFilter)]
    monkeypatch.setattr(exporter_log, "filters", own)
    log = io.StringIO()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        telemetry = configure("broker", "b", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with logging_to(log, level):
            telemetry.meter.create_counter("a").add(1)
            telemetry.shutdown()

    failures = [line for line in log.getvalue().splitlines() if "Failed to export" in line]
    assert len(failures) == lines
    assert all(" WARNING " in line for line in failures)


def _queues(collector: OtlpCollector, name: str) -> set[str]:
    """The queues of which a metric came."""
    return {
        attribute.value.string_value
        for point in collector.points(name)
        for attribute in point.attributes
        if attribute.key == "messaging.destination.name"
    }


@contextmanager
def logging_to(stream: io.StringIO, level: str) -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    logs.configure("broker", level, stream=stream)
    try:
        yield
    finally:
        root.handlers[:], root.level = before
