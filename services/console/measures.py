"""What the console measures of itself: its pages, and the load that it puts on the instance.

Without an HTTP port every instrument is a no-op, and requests are not even timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.metrics import Counter, Histogram, Observation
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from libs.serving.process.process_measures import measure_process, measure_serving
from libs.serving.telemetry import Telemetry
from libs.serving.tls import measure_certificates
from services.console.config import ConsoleConfig

STREAMS: Final = "/live/"
"""Paths that begin so are open for minutes: streams are counted, not timed."""

BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""The buckets that OpenTelemetry's conventions for HTTP advise."""


REFUSED: Final = "slatemq.login.refused"
"""Of a login, whether its token was refused."""

METHODS: Final = ("GET", "HEAD", "POST")
"""The methods with a series of their own: anyone may send any number of others."""


class Measures(NamedTuple):
    """The instruments.

    Attributes:
        requests: Durations of answers in s, by method, route and status.
        samples: Durations of looks at the instance in s; one may serve several persons.
        logins: Tokens that were checked, by whether they were refused.
    """

    requests: Histogram
    samples: Histogram
    logins: Counter


def measures_of(telemetry: Telemetry, config: ConsoleConfig) -> Measures:
    meter = telemetry.meter
    measure_process(meter)
    measure_serving(meter, lambda: True)
    measure_certificates(meter, config)
    logins = meter.create_counter(
        "slatemq.console.logins", unit="{login}", description="Tokens that were checked"
    )
    for refused in (False, True):  # So that there is a number before the first one.
        logins.add(0, {REFUSED: refused})
    return Measures(
        meter.create_histogram(
            "http.server.request.duration",
            unit="s",
            description="Duration of the console's answers, but for streams",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        ),
        meter.create_histogram(
            "slatemq.console.sample.duration",
            unit="s",
            description="Duration of a look at the instance, for all pages that it serves",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        ),
        logins,
    )


def measure_viewers(
    telemetry: Telemetry, viewers: Callable[[], int], streams: Callable[[], int]
) -> None:
    """Registers how many people have pages open, and how many of these are updated."""
    telemetry.meter.create_observable_gauge(
        "slatemq.console.viewers",
        callbacks=[lambda _: [Observation(viewers())]],
        unit="{viewer}",
        description="Tokens for which the instance is being sampled",
    )
    telemetry.meter.create_observable_gauge(
        "slatemq.console.streams",
        callbacks=[lambda _: [Observation(streams())]],
        unit="{stream}",
        description="Open pages that are updated",
    )


class Timed:
    """An ASGI middleware that records how long each answer took, and a span of it.

    The span begins a trace, whatever the browser sends: what the audit has of an act is its ID.
    """

    def __init__(self, app: ASGIApp, tracer: trace.Tracer, durations: Histogram) -> None:
        self._app = app
        self._tracer = tracer
        self._durations = durations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(STREAMS):
            await self._app(scope, receive, send)
            return
        began_s = time.monotonic()
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        status = 500

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        with self._tracer.start_as_current_span(
            method, context=Context(), kind=trace.SpanKind.SERVER
        ) as span:
            try:
                await self._app(scope, receive, send_noted)
            finally:
                route = scope.get("route")
                facts = {
                    "http.request.method": method,
                    "http.route": route.path if route is not None else "none",
                    "http.response.status_code": status,
                }
                self._durations.record(time.monotonic() - began_s, facts)
                if route is not None:
                    span.update_name(f"{method} {route.path}")
                span.set_attributes({**facts, "url.path": scope["path"]})
                if status >= 500:
                    span.set_status(trace.StatusCode.ERROR)
