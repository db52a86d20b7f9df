"""The metrics of this process in Prometheus' text format; loaded where there is an HTTP port."""

from __future__ import annotations

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

__all__ = ["CONTENT_TYPE", "Exposition"]

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


class Exposition:
    """The process's metrics, read on request.

    Attributes:
        reader: The reader of the meter provider.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.reader = PrometheusMetricReader(scope_info_enabled=False, registry=self._registry)

    def render(self) -> bytes:
        """The metrics as text; takes tens of ms with many queues, so call it off the event loop."""
        return generate_latest(self._registry)
