"""Events: the envelope, the catalogue of types, and the notifications of S3 stores.

In reading order:

`envelope`      one event, and its JSON
`catalogue`     the known event types, and their data
`s3`            notifications of S3 stores as events
`messages`      events as messages of queues
`cloud_events`  CloudEvents 1.0, for which the extra `slatemq[events]` brings the SDK

It needs msgspec and python-ulid, which the extras `slatemq[events]` and `slatemq[cli]` bring.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from slatemq.events.catalogue import CATALOGUE, EventData, data_of, make_event
from slatemq.events.envelope import Event, decode_event, encode_event
from slatemq.events.messages import message_of
from slatemq.events.s3 import Notifications, headers_of, read_notifications

if TYPE_CHECKING:
    from slatemq.events.cloud_events import (
        CLOUD_EVENT_CONTENT_TYPE,
        decode_cloud_event,
        encode_cloud_event,
    )

__all__ = [
    "CATALOGUE",
    "CLOUD_EVENT_CONTENT_TYPE",
    "Event",
    "EventData",
    "Notifications",
    "data_of",
    "decode_cloud_event",
    "decode_event",
    "encode_cloud_event",
    "encode_event",
    "headers_of",
    "make_event",
    "message_of",
    "read_notifications",
]


def __getattr__(name: str) -> Any:
    # Loaded on demand: the extra `cli` does not bring the SDK of CloudEvents.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.cloud_events"), name)
