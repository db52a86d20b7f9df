"""What a process measures of itself, whatever it serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from libs.serving.process.memory import memory_limit_bytes, resident_bytes


def measure_process(meter: Meter) -> None:
    """Registers what the process takes of its machine, and since when it runs."""
    began_s = time.monotonic()
    meter.create_observable_gauge(
        "process.uptime",
        callbacks=[lambda _: [Observation(time.monotonic() - began_s)]],
        unit="s",
        description="Since the start of the process, from which on its counters count",
    )
    meter.create_observable_up_down_counter(
        "process.memory.usage",
        callbacks=[lambda _: [Observation(resident_bytes())]],
        unit="By",
        description="Physical memory that the process takes",
    )
    meter.create_observable_gauge(
        "slatemq.memory.limit",
        callbacks=[_limit],
        unit="By",
        description="Physical memory that the container of the process may take",
    )
    meter.create_observable_counter(
        "process.cpu.time",
        callbacks=[lambda _: [Observation(time.process_time())]],
        unit="s",
        description="Processor time that the process has taken",
    )


def _limit(_: CallbackOptions) -> Iterable[Observation]:
    limit_bytes = memory_limit_bytes()
    return [] if limit_bytes is None else [Observation(limit_bytes)]


def measure_serving(meter: Meter, is_serving: Callable[[], bool]) -> None:
    """Registers whether the process serves."""
    meter.create_observable_gauge(
        "slatemq.serving",
        callbacks=[lambda _: [Observation(int(is_serving()))]],
        description="1 while the health of the process says SERVING, else 0",
    )
