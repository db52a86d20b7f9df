"""SlateMQ: a durable message queue whose only durable state is an object store.

    async with slatemq.connect("127.0.0.1:7420") as client:
        await client.publish(b"hello", {"queue": "greetings"})

`slatemq.sync` has the same for programs without asyncio, `slatemq.errors` every error, `slatemq.v1`
the generated protobuf messages and stubs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from slatemq.batches import BatchConsumer
    from slatemq.client import Client, connect
    from slatemq.consumer import Consumer
    from slatemq.delivered import Batch, Received
    from slatemq.models import (
        BatchSettings,
        Counts,
        DeletedQueue,
        Explanation,
        OutgoingMessage,
        Queue,
        RouteStatus,
        ServiceStatus,
        Status,
        Topology,
    )

__all__ = [
    "Batch",
    "BatchConsumer",
    "BatchSettings",
    "Client",
    "Consumer",
    "Counts",
    "DeletedQueue",
    "Explanation",
    "OutgoingMessage",
    "Queue",
    "Received",
    "RouteStatus",
    "ServiceStatus",
    "Status",
    "Topology",
    "connect",
]

_HOMES = {
    "Client": "slatemq.client",
    "connect": "slatemq.client",
    "Consumer": "slatemq.consumer",
    "Batch": "slatemq.delivered",
    "BatchConsumer": "slatemq.batches",
    "Received": "slatemq.delivered",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the services import slatemq.errors, and need no client for that.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES.get(name, "slatemq.models")), name)
