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


_KNOWING = frozenset({"kafka", "redis"})
"""Those in which a sole consumer takes at once what is there, and what one before it had."""


def open_backend(name: str, *, is_sole_consumer: bool = False) -> QueueBackend[Any]:
    """A backend that is not connected yet; imports its client library.

    `is_sole_consumer`: nobody else dequeues the tasks below its names at the same time.
    """
    module, kind = _CLASSES[name]
    make = getattr(import_module(module), kind)
    backend: QueueBackend[Any] = (
        make(is_sole_consumer=is_sole_consumer) if name in _KNOWING else make()
    )
    return backend
