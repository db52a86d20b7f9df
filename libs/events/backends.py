"""The classes of the backends; each is imported when it is opened."""

from __future__ import annotations

from importlib import import_module

from opentelemetry.metrics import Meter

from libs.events.backend import QueueBackend
from libs.events.measures import QueueMeasures

_CLASSES = {
    "activemq": ("libs.events.activemq.backend", "ActivemqBackend"),
    "kafka": ("libs.events.kafka.backend", "KafkaBackend"),
    "rabbitmq": ("libs.events.rabbitmq.backend", "RabbitmqBackend"),
    "slatemq": ("libs.events.slatemq.backend", "SlatemqBackend"),
    "redis": ("libs.events.redis.backend", "RedisBackend"),
}


def open_backend(
    name: str,
    meter: Meter | None = None,
    *,
    is_sole_consumer: bool = False,
    gather_ms: int = 0,
) -> QueueBackend:
    """A backend that is not connected yet; imports its client library.

    Args:
        name: As in the settings.
        meter: Gets its counters.
        is_sole_consumer: No other consumer dequeues these tasks at the same time. So it takes all
            that waits, and the tasks of the consumer before it, immediately.
        gather_ms: The least time between two reads of tasks, unless more tasks wait than one read
            takes: each read is a write to the server, and delays callers that enqueue.
    """
    module, kind = _CLASSES[name]
    make = getattr(import_module(module), kind)
    backend: QueueBackend = make(is_sole_consumer=is_sole_consumer, gather_ms=gather_ms)
    if meter is not None:
        backend.measures = QueueMeasures(name, meter)
    return backend
