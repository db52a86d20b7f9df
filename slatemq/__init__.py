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
    from slatemq.entry_models import (
        Attempt,
        Entry,
        EntryPage,
        EntryState,
        EntryView,
        SearchProgress,
        StoredMessage,
    )
    from slatemq.models import (
        BatchSettings,
        Explanation,
        OutgoingMessage,
        RouteStatus,
        ServiceStatus,
        Status,
        Topology,
    )
    from slatemq.published import Published
    from slatemq.queue_models import (
        Backoff,
        BackoffKind,
        Counts,
        DeletedQueue,
        PriorityCounts,
        Queue,
        Replay,
        ReplayRange,
    )

__all__ = [
    "Attempt",
    "Backoff",
    "BackoffKind",
    "Batch",
    "BatchConsumer",
    "BatchSettings",
    "Client",
    "Consumer",
    "Counts",
    "DeletedQueue",
    "Entry",
    "EntryPage",
    "EntryState",
    "EntryView",
    "Explanation",
    "OutgoingMessage",
    "PriorityCounts",
    "Published",
    "Queue",
    "Received",
    "Replay",
    "ReplayRange",
    "RouteStatus",
    "SearchProgress",
    "ServiceStatus",
    "Status",
    "StoredMessage",
    "Topology",
    "connect",
]

_HOMES = {
    "slatemq.batches": ["BatchConsumer"],
    "slatemq.client": ["Client", "connect"],
    "slatemq.consumer": ["Consumer"],
    "slatemq.delivered": ["Batch", "Received"],
    "slatemq.entry_models": [
        "Attempt",
        "Entry",
        "EntryPage",
        "EntryState",
        "EntryView",
        "SearchProgress",
        "StoredMessage",
    ],
    "slatemq.published": ["Published"],
    "slatemq.queue_models": [
        "Backoff",
        "BackoffKind",
        "Counts",
        "DeletedQueue",
        "PriorityCounts",
        "Queue",
        "Replay",
        "ReplayRange",
    ],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: the services import slatemq.errors, and need no client for that.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME_OF.get(name, "slatemq.models")), name)
