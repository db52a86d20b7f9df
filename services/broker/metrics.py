"""What the broker measures, by OpenTelemetry; nothing when telemetry is off."""

from __future__ import annotations

import time
from collections.abc import Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from libs.serving.telemetry import MESSAGING_DESTINATION_NAME, Telemetry
from services.broker.outbox import Outbox
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


def measure_outbox(telemetry: Telemetry, outbox: Outbox) -> None:
    """Registers gauges of what waits to be sent to each ingest: rows, and the age of the oldest."""
    if not telemetry.enabled:
        return

    def rows(_: CallbackOptions) -> Iterable[Observation]:
        for ingest_shard in outbox.ingest_shards:
            yield Observation(outbox.waiting_count(ingest_shard), _of(ingest_shard))

    def age(_: CallbackOptions) -> Iterable[Observation]:
        now_ms = time.time() * 1000  # this is another thread: the owner's clock is not for it
        for ingest_shard in outbox.ingest_shards:
            oldest_ms = outbox.oldest_ms(ingest_shard)
            age_ms = 0 if oldest_ms is None else now_ms - oldest_ms
            yield Observation(max(age_ms, 0) / 1000, _of(ingest_shard))

    telemetry.meter.create_observable_gauge(
        "slatemq.outbox.messages",
        callbacks=[rows],
        unit="{message}",
        description="Pushed messages that wait for an ingest",
    )
    telemetry.meter.create_observable_gauge(
        "slatemq.outbox.age",
        callbacks=[age],
        unit="s",
        description="How long the oldest pushed message has waited for an ingest",
    )


def _of(ingest_shard: int) -> dict[str, int]:
    return {"slatemq.ingest.shard": ingest_shard}
