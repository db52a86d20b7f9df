"""A collector of OTLP that keeps what it was sent."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import (
    metrics_service_pb2,
    metrics_service_pb2_grpc,
)
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


class OtlpCollector(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Takes requests of 4 MB, as collectors do.

    Attributes:
        metrics: Requests with metrics, with the metadata of each.
        traces: Those with spans.
    """

    def __init__(self) -> None:
        self.metrics: list[tuple[Any, dict[str, Any]]] = []
        self.traces: list[tuple[Any, dict[str, Any]]] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - both services have it
        metadata = dict(context.invocation_metadata())
        if isinstance(request, metrics_service_pb2.ExportMetricsServiceRequest):
            self.metrics.append((request, metadata))
            return metrics_service_pb2.ExportMetricsServiceResponse()
        self.traces.append((request, metadata))
        return trace_service_pb2.ExportTraceServiceResponse()

    def points(self, name: str) -> list[Any]:
        """The values of a metric, of all requests."""
        return [
            point
            for request, _ in list(self.metrics)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            if metric.name == name
            for point in getattr(metric, metric.WhichOneof("data")).data_points
        ]


@contextmanager
def collecting(tls: grpc.ServerCredentials | None = None) -> Iterator[tuple[OtlpCollector, str]]:
    """A collector and its URL."""
    collector = OtlpCollector()
    server = grpc.server(ThreadPoolExecutor(2))
    adders: list[Any] = [
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server,
        metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server,
    ]
    for add in adders:
        add(collector, server)
    if tls is None:
        url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    else:
        url = f"https://localhost:{server.add_secure_port('localhost:0', tls)}"
    server.start()
    try:
        yield collector, url
    finally:
        server.stop(None).wait()
