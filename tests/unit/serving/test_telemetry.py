import os
import socket
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from libs.serving import telemetry
from libs.serving.recording import exporting, recording
from libs.serving.requests.calls import UNRECORDED, MethodCalls


@pytest.fixture
def recorded() -> Iterator[telemetry.Telemetry]:
    made = recording(
        "broker", "broker-0", SimpleSpanProcessor(InMemorySpanExporter()), InMemoryMetricReader()
    )
    yield made
    made.shutdown()


def test_each_process_has_an_id_of_its_own_although_each_container_numbers_its_own_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    found = []
    for host in ("slatemq-broker-0", "slatemq-broker-standby-0", "slatemq-console-x7"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        found += [
            telemetry.instance_id("broker", 0, has_standbys=False),
            telemetry.instance_id("broker", 1, has_standbys=False),
            telemetry.instance_id("console", None, has_standbys=False),
        ]

    assert len({*found}) == len(found)
    assert found[0] == "slatemq-broker-0/broker-0"
    assert found[-1] == "slatemq-console-x7/console-1"


def test_two_processes_of_one_shard_on_one_host_are_not_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = set()
    for process in (4711, 4712):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        found.add(telemetry.instance_id("broker", 0, has_standbys=True))

    assert len(found) == 2


def test_attributes_of_the_environment_replace_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "OTEL_RESOURCE_ATTRIBUTES", "service.instance.id=mine,deployment.environment=test"
    )
    spans = InMemorySpanExporter()
    made = recording("broker", "host/broker-0", SimpleSpanProcessor(spans), InMemoryMetricReader())
    with made.tracer.start_as_current_span("publish"):
        pass
    made.shutdown()

    (span,) = spans.get_finished_spans()
    has = span.resource.attributes
    assert has["service.instance.id"] == "mine"
    assert has["deployment.environment"] == "test"
    assert has["service.name"] == "slatemq-broker"


def test_nothing_is_recorded_without_an_endpoint() -> None:
    off = telemetry.configure("broker", "broker-0")

    assert not off.enabled
    assert MethodCalls(off, "/a/B").begin(None) is UNRECORDED
    with off.tracer.start_as_current_span("x") as span:
        assert not span.is_recording()


def test_the_context_crosses_in_the_headers(recorded: telemetry.Telemetry) -> None:
    headers = {"type": "order"}

    with recorded.tracer.start_as_current_span("publish") as span:
        telemetry.inject(headers)

    found = trace.get_current_span(telemetry.extract(headers)).get_span_context()
    assert found.trace_id == span.get_span_context().trace_id
    assert headers["type"] == "order"


def test_a_message_with_255_headers_gets_no_context(recorded: telemetry.Telemetry) -> None:
    headers = {f"k{n}": "" for n in range(255)}

    with recorded.tracer.start_as_current_span("publish"):
        telemetry.inject(headers)

    assert len(headers) == 255
    assert "traceparent" not in headers


def test_a_context_set_by_the_producer_stays(recorded: telemetry.Telemetry) -> None:
    headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}

    with recorded.tracer.start_as_current_span("publish"):
        telemetry.inject(headers)

    assert headers["traceparent"].startswith("00-1111")


def test_headers_without_a_context_give_an_empty_one() -> None:
    found = trace.get_current_span(telemetry.extract({"traceparent": "rubbish"}))

    assert not found.get_span_context().is_valid


@pytest.mark.parametrize("header", ["api-key:hidden", 'x-team="hidden"', "=hidden"])
def test_a_header_for_the_collector_in_another_form_is_not_logged(
    header: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)

    exporting("broker", "broker-0", "http://127.0.0.1:1", 0, ()).shutdown()

    assert "Header format invalid" in caplog.text
    assert "hidden" not in caplog.text


def test_errors_that_a_span_records_have_no_secrets() -> None:
    exporter = InMemorySpanExporter()
    made = recording("broker", "broker-0", SimpleSpanProcessor(exporter))

    with (
        pytest.raises(OSError, match="hunter2"),
        made.tracer.start_as_current_span("connect", attributes={"queue": "orders"}),
    ):
        raise OSError(
            "redis://queue:hunter2@10.0.0.7/0 refused the token smq_abcd_hunter2hunter2hunter2"
        )

    (span,) = exporter.get_finished_spans()
    (event,) = span.events
    assert span.attributes == {"queue": "orders"}
    assert event.attributes is not None
    assert "redis://***@10.0.0.7" in str(event.attributes["exception.message"])
    assert "hunter2" not in span.to_json()
    assert "10.0.0.7" in str(span.status.description)


def test_the_status_of_a_span_without_exceptions_has_no_secret() -> None:
    exporter = InMemorySpanExporter()
    made = recording("janitor", "janitor-0", SimpleSpanProcessor(exporter))

    with made.tracer.start_as_current_span("janitor backup") as span:
        span.set_status(trace.StatusCode.ERROR, "listing http://key:hunter2@10.0.0.7/b failed")

    (ended,) = exporter.get_finished_spans()
    assert ended.events == ()
    assert ended.status.description == "listing http://***@10.0.0.7/b failed"
