"""Metrics whose series come and go while a process runs: of its queues, and of its routes.

An instrument of OpenTelemetry's SDK keeps every set of attributes that it has had until the process
ends, and puts what comes after 2,000 of them into one series. So these metrics are no instruments:
each scrape and each export reads what there is, and what is gone has no series.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

Attributes = Mapping[str, str | int]
Point = tuple[float, Attributes]

STEP_POINTS: Final = 500
PAUSE_S: Final = 0.001
"""A step takes some milliseconds. While a thread goes on without a pause, each of the others, the
event loop's too, waits 5 ms whenever it wants a turn."""

_UNITS: Final = {"s": "_seconds", "1": ""}
"""As they end a name in Prometheus; those in braces are left out."""

_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class LiveSeries(NamedTuple):
    """One such metric.

    Attributes:
        name: As OpenTelemetry has it, e.g. `slatemq.queue.messages`.
        read: Returns the values that there are now, with their attributes; called in a thread.
        unit: As OpenTelemetry has it.
        is_counter: Whether it counts, since the start of the process.
    """

    name: str
    read: Callable[[], Iterable[Point]]
    unit: str
    description: str
    is_counter: bool

    def points(self) -> Iterator[Point]:
        """What is read, in steps; there may be 100,000."""
        try:
            for number, point in enumerate(self.read(), 1):
                yield point
                if not number % STEP_POINTS:
                    time.sleep(PAUSE_S)
        except Exception:  # what this reads may change meanwhile; the other metrics stay
            log.exception("the series of %s are incomplete", self.name)


def exposition_of(series: Iterable[LiveSeries]) -> bytes:
    """All of them in Prometheus' text format, whose library takes three times as long."""
    return b"".join(["".join(_lines(one)).encode() for one in series])


def _lines(one: LiveSeries) -> Iterator[str]:
    name = _prometheus_name(one.name)
    name += "" if one.unit.startswith("{") else _UNITS[one.unit]
    name += "_total" if one.is_counter else ""
    kind = "counter" if one.is_counter else "gauge"
    yield f"# HELP {name} {one.description}\n# TYPE {name} {kind}\n"
    for value, attributes in one.points():
        labels = [
            f'{_prometheus_name(key)}="{str(text).translate(_ESCAPES)}"'
            for key, text in attributes.items()
        ]
        yield f"{name}{{{','.join(labels)}}} {float(value)}\n"


@cache
def _prometheus_name(name: str) -> str:
    return name.replace(".", "_")
