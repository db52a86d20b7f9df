"""What the broker measures, by OpenTelemetry; nothing when telemetry is off."""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from libs.serving.telemetry import MESSAGING_DESTINATION_NAME, Telemetry
from services.broker.shard_machine import Shard


def measure(telemetry: Telemetry, shard: Shard) -> None:
    """Registers gauges of each queue's messages by state; read when they are sent."""
    if not telemetry.enabled:
        return

    def depths(_: CallbackOptions) -> Iterable[Observation]:
        for queue_id, queue in list(shard.queues.items()):
            try:
                counts = {
                    "available": queue.ready_count,
                    "delayed": queue.timed_count,
                    "in_flight": queue.in_flight_count,
                    "done": queue.done_count,
                    "failed": queue.failed_count,
                }
            except RuntimeError:
                continue  # This is another thread, and the queue changed: read it the next time.
            for state, count in counts.items():
                yield Observation(
                    count, {MESSAGING_DESTINATION_NAME: queue_id, "slatemq.message.state": state}
                )

    telemetry.meter.create_observable_gauge(
        "slatemq.queue.messages",
        callbacks=[depths],
        unit="{message}",
        description="Messages of a queue by state",
    )
