"""CloudEvents 1.0, structured JSON: the second encoding of an event.

=================  ====================================================
CloudEvents        the envelope
=================  ====================================================
`id`               `id`
`type`             `type`, below `io.slatemq.`
`source`           `source`, as the URI reference `/slatemq/SOURCE`
`time`             `timestamp`
`subject`          the queue, else bucket and key, else the message ID
`requestid`        `request_id` (an extension attribute)
`data`             `data`
=================  ====================================================
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from cloudevents.core.exceptions import BaseCloudEventException
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from slatemq.errors import InvalidArgument
from slatemq.events.envelope import Event, check_finite, format_timestamp

TYPE_PREFIX = "io.slatemq."
SOURCE_PREFIX = "/slatemq/"
CONTENT_TYPE = "application/cloudevents+json"

_NO_CLOUD_EVENT = (
    BaseCloudEventException,
    ValueError,
    TypeError,
    RecursionError,
    KeyError,
    AttributeError,
)
"""What the library raises; the last two for JSON that is not an object."""


def encode_cloud_event(event: Event) -> bytes:
    """The event as a CloudEvent in structured JSON.

    Raises InvalidArgument for data that JSON cannot hold.
    """
    attributes: dict[str, Any] = {
        "id": event.id,
        "source": SOURCE_PREFIX + event.source,
        "type": TYPE_PREFIX + event.type,
        "specversion": "1.0",
        "time": datetime.fromisoformat(event.timestamp),
        "datacontenttype": "application/json",
    }
    if event.request_id:
        attributes["requestid"] = event.request_id
    subject = subject_of(event)
    if subject:
        attributes["subject"] = subject
    try:
        encoded = JSONFormat().write(CloudEvent(attributes, event.data))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("event", f"cannot be written as JSON: {error}") from error
    check_finite("event", event.data)
    return encoded


def decode_cloud_event(encoded: bytes) -> Event:
    """The event in a CloudEvent that SlateMQ encoded. Raises InvalidArgument."""
    try:
        cloud = JSONFormat().read(CloudEvent, encoded)
    except _NO_CLOUD_EVENT as error:
        raise InvalidArgument("event", f"is not a CloudEvent in JSON: {error}") from error
    kind, source, time = cloud.get_type(), cloud.get_source(), cloud.get_time()
    if not kind.startswith(TYPE_PREFIX) or not source.startswith(SOURCE_PREFIX) or time is None:
        raise InvalidArgument("event", f"is not of SlateMQ: type {kind!r}, source {source!r}")
    data = cloud.get_data()
    if not isinstance(data, dict):
        raise InvalidArgument("event.data", "must be a JSON object")
    check_finite("event.data", data)
    return Event(
        id=cloud.get_id(),
        type=kind.removeprefix(TYPE_PREFIX),
        timestamp=format_timestamp(round(time.timestamp() * 1000)),
        source=source.removeprefix(SOURCE_PREFIX),
        request_id=str(cloud.get_extension("requestid") or ""),
        data=data,
    )


def subject_of(event: Event) -> str:
    """What an event is about: its queue, else bucket and key, else its message ID, else empty."""
    data = event.data
    if "queue" in data:
        return str(data["queue"])
    if "bucket" in data:
        return f"{data['bucket']}/{data['key']}" if "key" in data else str(data["bucket"])
    return str(data.get("message_id", ""))
