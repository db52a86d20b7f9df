"""CloudEvents 1.0, structured JSON: the second encoding of an event.

=================  ====================================================
CloudEvents        the envelope
=================  ====================================================
`id`               `id`
`type`             `type`, below `io.slatemq.`
`source`           `source`, as the URI reference `/slatemq/SOURCE`,
                   percent-encoded
`time`             `timestamp`
`subject`          the queue, else bucket and key, else the message ID
`requestid`        `request_id` (an extension attribute)
`data`             `data`
=================  ====================================================

In `subject` and `requestid`, `%` and what CloudEvents forbids in attributes (control characters,
code points that are no characters) are percent-encoded.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Literal
from urllib.parse import quote, unquote

import msgspec
from cloudevents.core.exceptions import BaseCloudEventException
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from slatemq.errors import InvalidArgument
from slatemq.events.envelope import (
    Event,
    check_finite,
    decode_struct,
    format_timestamp,
    parse_timestamp,
)

TYPE_PREFIX = "io.slatemq."
SOURCE_PREFIX = "/slatemq/"
SOURCE_CHARACTERS = "/:@!$&'()*+,;="
"""Those of a URI's path (RFC 3986) that stay as they are, beside letters, digits and `-._~`."""

CLOUD_EVENT_CONTENT_TYPE = "application/cloudevents+json"

_NO_CHARACTERS = "\ufdd0-\ufdef" + "".join(
    f"{chr(plane + 0xFFFE)}{chr(plane + 0xFFFF)}" for plane in range(0, 0x110000, 0x10000)
)
_ENCODED = re.compile(f"[%\x00-\x1f\x7f-\x9f{_NO_CHARACTERS}]")
"""Control characters and code points that are no characters (CloudEvents 1.0, String), and `%`."""


class _Members(msgspec.Struct, frozen=True, kw_only=True):
    """What each event of SlateMQ has; the library would make up an ID, a time and a version."""

    specversion: Literal["1.0"]
    id: str
    source: str
    type: str
    time: str
    requestid: str | None = None
    data: dict[str, Any]


def encode_cloud_event(event: Event) -> bytes:
    """The event as a CloudEvent in structured JSON.

    Raises InvalidArgument for what JSON cannot hold.
    """
    try:
        encoded = JSONFormat().write(CloudEvent(_attributes(event), event.data))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument("event", f"cannot be written as JSON: {error}") from error
    check_finite("event", event.data)
    return encoded


def _attributes(event: Event) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "id": event.id,
        "source": SOURCE_PREFIX + quote(event.source, safe=SOURCE_CHARACTERS),
        "type": TYPE_PREFIX + event.type,
        "specversion": "1.0",
        "time": datetime.fromisoformat(event.timestamp),
        "datacontenttype": "application/json",
    }
    if event.request_id:
        attributes["requestid"] = _without_controls(event.request_id)
    subject = subject_of(event)
    if subject:
        attributes["subject"] = _without_controls(subject)
    return attributes


def _without_controls(text: str) -> str:
    return _ENCODED.sub(lambda found: quote(found[0], safe=""), text)


def decode_cloud_event(encoded: bytes) -> Event:
    """The event in a CloudEvent that SlateMQ encoded.

    The library reads it once all that it would make up is known to be there. Raises
    InvalidArgument, which names the member.
    """
    members = decode_struct(encoded, _Members, "event")
    at_ms = parse_timestamp("event.time", members.time.upper())  # RFC 3339 permits t and z
    try:
        JSONFormat().read(CloudEvent, encoded)
    except (BaseCloudEventException, ValueError, RecursionError) as error:
        raise InvalidArgument("event", f"is not a CloudEvent in JSON: {error}") from error
    kind, source = members.type, members.source
    if not kind.startswith(TYPE_PREFIX) or not source.startswith(SOURCE_PREFIX):
        raise InvalidArgument("event", f"is not of SlateMQ: type {kind!r}, source {source!r}")
    return Event(
        id=members.id,
        type=kind.removeprefix(TYPE_PREFIX),
        timestamp=format_timestamp(at_ms),
        source=_unquoted("source", source.removeprefix(SOURCE_PREFIX)),
        request_id=_unquoted("requestid", members.requestid or ""),
        data=members.data,
    )


def _unquoted(member: str, text: str) -> str:
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"event.{member}", f"is not UTF-8 in {text!r}") from error


def subject_of(event: Event) -> str:
    """What an event is about: its queue, else bucket and key, else its message ID, else empty."""
    data = event.data
    if "queue" in data:
        return str(data["queue"])
    if "bucket" in data:
        return f"{data['bucket']}/{data['key']}" if "key" in data else str(data["bucket"])
    return str(data.get("message_id", ""))
