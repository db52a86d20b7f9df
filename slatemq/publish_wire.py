"""Messages on their way out: their wire form, their size, and errors about one of many."""

from __future__ import annotations

import re
from collections.abc import Mapping

from slatemq.errors import InvalidArgument
from slatemq.models import OutgoingMessage
from slatemq.v1 import ingest_pb2

PLACE = re.compile(r"messages\[(\d+)\]\.?(.*)", re.DOTALL)
"""The message and its part that an error of the server names."""


def size_of(message: OutgoingMessage) -> int:
    """About the bytes of a message in a request."""
    try:
        size = len(message.payload) + 64
        if message.headers:
            size += sum(len(key) + len(value) + 8 for key, value in message.headers.items())
    except (TypeError, AttributeError) as error:
        if isinstance(message.headers, Mapping):
            _check_texts(message.headers)
        raise InvalidArgument("message", f"has a value of a wrong type: {error}") from error
    return size


def _check_texts(headers: Mapping[str, str], where: str = "") -> None:
    """Names the first header that is no text."""
    for key, value in headers.items():
        for what in (key, value):
            if not isinstance(what, str):
                raise InvalidArgument(
                    f"{where}headers[{key!r}]", f"must be text, not {type(what).__name__}"
                )


def add(request: ingest_pb2.PublishRequest, message: OutgoingMessage) -> None:
    """Adds a message to a request, or nothing. Raises InvalidArgument for what has no wire form."""
    before = len(request.messages)
    try:
        wire = request.messages.add(payload=message.payload)
        if message.headers:
            wire.headers.update(message.headers)
        if message.created_at_ms is not None:
            wire.created_at_ms = message.created_at_ms
        if message.retention_s is not None:
            wire.retention_s = message.retention_s
        if message.delay_ms is not None:
            wire.delay_ms = message.delay_ms
        if message.visible_at_ms is not None:
            wire.visible_at_ms = message.visible_at_ms
        if message.dedupe_key:
            wire.dedupe_key = message.dedupe_key
    except (TypeError, ValueError) as error:
        # Another type, text that is no UTF-8, or a number beyond 64 bits.
        del request.messages[before:]
        if isinstance(message.headers, Mapping):
            _check_texts(message.headers, f"messages[{before}].")
        raise InvalidArgument(f"messages[{before}]", str(error)) from error


def moved(error: InvalidArgument, field: str) -> InvalidArgument:
    """The same error about another field: who published one message knows of no batch."""
    return InvalidArgument(
        field.rstrip("."), error.description, reason=error.reason, metadata=error.metadata
    )
