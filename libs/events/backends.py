"""Which class carries which backend; each is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from libs.events.backend import QueueBackend

_CLASSES = {
    "activemq": ("libs.events.activemq.backend", "ActivemqBackend"),
    "kafka": ("libs.events.kafka.backend", "KafkaBackend"),
    "rabbitmq": ("libs.events.rabbitmq.backend", "RabbitmqBackend"),
    "slatemq": ("libs.events.slatemq.backend", "SlatemqBackend"),
    "redis": ("libs.events.redis.backend", "RedisBackend"),
}


def open_backend(name: str) -> QueueBackend[Any]:
    """A backend that is not connected yet; imports its client library."""
    module, kind = _CLASSES[name]
    backend: QueueBackend[Any] = getattr(import_module(module), kind)()
    return backend
