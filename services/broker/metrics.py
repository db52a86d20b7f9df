"""What the broker measures, by OpenTelemetry; nothing when telemetry is off."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from libs.serving.live_series import Point
from libs.serving.telemetry import MESSAGING_DESTINATION_NAME, Telemetry
from services.broker.core.lists.outbox import Outbox
from services.broker.core.queue import Queue
from services.broker.core.shard import Shard
from services.broker.delivery.in_flight_limit import InFlightLimit

STATE = "slatemq.message.state"


def measure(telemetry: Telemetry, shard: Shard) -> None:
    """Registers what each queue holds and what became of its attempts; read when it is sent."""

    def gauge(name: str, read: Read, unit: str, description: str) -> None:
        telemetry.create_live_gauge(name, _of_queues(shard, read), unit, description)

    def counter(name: str, read: Read, unit: str, description: str) -> None:
        telemetry.create_live_counter(name, _of_queues(shard, read), unit, description)

    gauge("slatemq.queue.messages", _by_state, "{message}", "Messages of a queue by state")
    gauge(
        "slatemq.queue.priority.messages",
        _by_priority,
        "{message}",
        "Available and delayed messages of a queue by priority; priorities without any left out",
    )
    gauge(
        "slatemq.queue.oldest_claimable.age",
        lambda queue: [((queue.waiting.counts(_wall_ms()).oldest_claimable_ms or 0) / 1000, {})],
        "s",
        "How long the message has been claimable that waits longest; 0 when none is",
    )
    gauge(
        "slatemq.queue.quarantined",
        lambda queue: [(int(bool(queue.settings.quarantine)), {})],
        "1",
        "1 while the queue is left out of routing, since its expressions took too long",
    )
    counter(
        "slatemq.queue.failed.attempts",
        lambda queue: [
            (queue.nacked_count, {"slatemq.attempt.outcome": "nacked"}),
            (queue.ended_leases_count, {"slatemq.attempt.outcome": "lease_expired"}),
        ],
        "{attempt}",
        "Attempts that ended in a nack, or with their lease",
    )
    counter(
        "slatemq.queue.claimed.messages",
        lambda queue: [(queue.claimed_count, {})],
        "{message}",
        "Messages claimed, again or for the first time",
    )
    counter(
        "slatemq.queue.acked.messages",
        lambda queue: [(queue.acked_count, {})],
        "{message}",
        "Messages that were acked",
    )
    counter(
        "slatemq.queue.redelivered.messages",
        lambda queue: [(queue.requeued_count, {})],
        "{message}",
        "Messages put back to be delivered again, after a nack or the end of a lease",
    )
    counter(
        "slatemq.queue.failed.messages",
        lambda queue: [(queue.dead_letters_count, {})],
        "{message}",
        "Messages that became dead letters",
    )
    counter(
        "slatemq.queue.expired.messages",
        lambda queue: [(queue.waiting.expired_count, {})],
        "{message}",
        "Messages dropped since their retention was over",
    )


CLAIM_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


def claim_waits(telemetry: Telemetry) -> Callable[[float], None]:
    """Records how long claims and streams wait for the messages that they get."""
    return telemetry.meter.create_histogram(
        "slatemq.claim.wait",
        unit="s",
        description="How long a claim or stream has waited for the messages that it gets",
        explicit_bucket_boundaries_advisory=CLAIM_BUCKETS_S,
    ).record


Read = Callable[[Queue], Iterable[Point]]


def _of_queues(shard: Shard, read: Read) -> Callable[[], Iterable[Point]]:
    def points() -> Iterable[Point]:
        for queue_id, queue in list(shard.queues.items()):
            try:
                read_now = list(read(queue))
            except (RuntimeError, LookupError):
                continue  # This is another thread, and the queue changed: read it the next time.
            for value, labels in read_now:
                yield value, {MESSAGING_DESTINATION_NAME: queue_id, **labels}

    return points


def _by_state(queue: Queue) -> Iterable[Point]:
    waiting = queue.waiting.counts(_wall_ms())
    yield waiting.available, {STATE: "available"}
    yield waiting.delayed, {STATE: "delayed"}
    yield queue.leases.count, {STATE: "in_flight"}
    yield queue.done.count, {STATE: "done"}
    yield queue.failed.count, {STATE: "failed"}
    yield queue.archived.count, {STATE: "archived"}


def _by_priority(queue: Queue) -> Iterable[Point]:
    for priority, available, delayed in queue.waiting.counts(_wall_ms()).by_priority:
        for state, count in (("available", available), ("delayed", delayed)):
            if count:
                yield count, {"slatemq.message.priority": priority, STATE: state}


def _wall_ms() -> int:
    return int(time.time() * 1000)  # this is another thread: the owner's clock is not for it


def measure_outbox(telemetry: Telemetry, outbox: Outbox) -> None:
    """Registers gauges of what waits for each ingest, and of what needs an operator."""

    def gauge(name: str, read: Callable[[int], float], unit: str, description: str) -> None:
        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for ingest_shard in outbox.ingest_shards:
                yield Observation(read(ingest_shard), {"slatemq.ingest.shard": ingest_shard})

        telemetry.meter.create_observable_gauge(name, [observe], unit, description)

    def age_s(ingest_shard: int) -> float:
        oldest_ms = outbox.oldest_ms(ingest_shard)
        return 0 if oldest_ms is None else max(_wall_ms() - oldest_ms, 0) / 1000

    gauge(
        "slatemq.outbox.refused.messages",
        lambda ingest_shard: sum(refused == ingest_shard for refused, _ in list(outbox.refused)),
        "{message}",
        "Pushed messages that an ingest refused permanently; they are set aside",
    )
    gauge(
        "slatemq.outbox.halted",
        lambda ingest_shard: int(ingest_shard in outbox.halts),
        "1",
        "1 while pushes to an ingest have stopped and need an operator",
    )
    gauge(
        "slatemq.outbox.messages",
        outbox.waiting_count,
        "{message}",
        "Pushed messages that wait for an ingest",
    )
    gauge(
        "slatemq.outbox.age",
        age_s,
        "s",
        "How long the oldest pushed message has waited for an ingest",
    )


def measure_in_flight(telemetry: Telemetry, limit: InFlightLimit) -> None:
    """Registers gauges of the messages in flight of all queues, and of claims held up by them."""
    telemetry.meter.create_observable_gauge(
        "slatemq.in_flight.messages",
        callbacks=[lambda _: [Observation(limit.messages_count)]],
        unit="{message}",
        description="Messages in flight of all queues; at most in_flight_max are claimed",
    )
    telemetry.meter.create_observable_gauge(
        "slatemq.in_flight.waiting.queues",
        callbacks=[lambda _: [Observation(limit.waiting_count)]],
        unit="{queue}",
        description="Queues whose claims wait since in_flight_max messages are in flight",
    )
