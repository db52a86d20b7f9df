"""The event envelope: what every backend carries, and its two encodings' common form.

::

    {"id": "evt_01KJ2G5Q00...", "type": "object.created", "timestamp": "2026-02-22T12:00:00.000Z",
     "source": "ingest-0", "request_id": "4442587FB7D0A2F9", "data": {...}}

`id` is `evt_` and a ULID where SlateMQ makes the event. Consumers use it as their idempotency key:
an event may be delivered more than once, always with the same ID.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain
from math import isfinite
from typing import Any, TypeVar

import msgspec
from ulid import ULID

from slatemq.errors import InvalidArgument

T = TypeVar("T")

EVENT_PREFIX = "evt_"

_RANDOM_BYTES = 10
_EPOCH = datetime.fromtimestamp(0, UTC)
LAST_DATE_MS = 253_402_300_799_999
"""The end of the year 9999, behind which there are no dates."""

TIMESTAMPS_KEPT = 256
"""Last ones that are known in both forms: many events are of one millisecond."""

TYPE_CHARACTERS_MAX = 100
"""Of an event type, which is a part of a topic's name in Kafka and a routing key in RabbitMQ."""

EVENT_ID_CHARACTERS_MAX = 128
"""Of an event's ID, which is a dedupe key in SlateMQ and a message ID in RabbitMQ."""

_EVENT_ID = re.compile(f"[!-~]{{1,{EVENT_ID_CHARACTERS_MAX}}}")
_TYPE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_TIMESTAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One change, as it travels. Readers pass over members that they do not know.

    Attributes:
        id: `evt_` and a ULID; others than SlateMQ choose theirs, such as a UUID.
        type: Dot-separated, such as `object.created`; the catalogue has the known ones.
        timestamp: When it happened: ISO 8601, UTC, with milliseconds; another form of ISO 8601 with
            a time zone becomes this one, since others than SlateMQ make events, too.
        source: The node that it happened at, such as `ingest-0`.
        request_id: The request that caused it.
        data: What happened, as JSON values; the catalogue has a class for each known type.
    """

    id: str
    type: str
    timestamp: str
    source: str
    request_id: str
    data: dict[str, Any]

    def __post_init__(self) -> None:
        """Raise InvalidArgument for an ID, a type or a timestamp that is none."""
        _check_event_id(self.id)
        check_type("type", self.type)
        at_ms = parse_timestamp("timestamp", self.timestamp)
        if not _TIMESTAMP.fullmatch(self.timestamp):  # to write it takes longer than all else here
            msgspec.structs.force_setattr(self, "timestamp", format_timestamp(at_ms))


def encode_event(event: Event) -> bytes:
    """The envelope as JSON, keys in the order of the class.

    Raises InvalidArgument for data that JSON cannot hold.
    """
    return encode_struct(event, "event")


def encode_struct(struct: msgspec.Struct, name: str) -> bytes:
    """A struct as JSON. Raises InvalidArgument for `name` where it has a value that is none."""
    try:
        encoded = msgspec.json.encode(struct)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(name, f"cannot be written as JSON: {error}") from error
    if b"null" in encoded:  # As NaN is written, too.
        check_finite(name, msgspec.to_builtins(struct))
    return encoded


def check_finite(name: str, value: object) -> None:
    """Raise InvalidArgument for `name` where a number in dicts and lists is NaN or infinite."""
    unchecked = [value]
    while unchecked:
        one = unchecked.pop()
        if isinstance(one, float) and not isfinite(one):
            raise InvalidArgument(name, f"cannot be written as JSON: it has no number {one}")
        if isinstance(one, dict):
            unchecked += chain(one, one.values())
        elif isinstance(one, list | tuple):
            unchecked += one


def decode_event(encoded: bytes | str) -> Event:
    """The event in an envelope. Raises InvalidArgument, which names the field."""
    return decode_struct(encoded, Event, "event")


def decode_struct(encoded: bytes | str, kind: type[T], name: str) -> T:
    """A struct from its JSON. Raises InvalidArgument that names the field below `name`."""
    try:
        return msgspec.json.decode(encoded, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgument(*_field_of(name, str(error))) from error


def convert_struct(value: Mapping[str, Any], kind: type[T], name: str) -> T:
    """A struct from JSON values. Raises InvalidArgument that names the field below `name`."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(*_field_of(name, str(error))) from error


def _field_of(name: str, error: str) -> tuple[str, str]:
    """Field and description from msgspec's "Expected `int`, got `str` - at `$.size`"."""
    description, _, place = error.partition(" - at `$")
    return name + place.rstrip("`"), description


def make_event_id(at_ms: int) -> str:
    """A new ID of an event that happened at `at_ms` (ms since the Unix epoch)."""
    return EVENT_PREFIX + str(ULID.from_timestamp(at_ms))


def derive_event_id(at_ms: int, *parts: object) -> str:
    """The ID of the event that `parts` name: the same each time that it is derived."""
    named = "\0".join(map(str, parts)).encode()
    digest = hashlib.blake2b(named, digest_size=_RANDOM_BYTES).digest()
    return EVENT_PREFIX + str(ULID.from_bytes(at_ms.to_bytes(6, "big") + digest))


def check_type(field: str, value: str) -> None:
    """Raise InvalidArgument unless `value` is an event type, known or not."""
    if not _TYPE.fullmatch(value) or len(value) > TYPE_CHARACTERS_MAX:
        raise InvalidArgument(
            field,
            "must be words of letters, digits, _ and - with dots between, like object.created, and "
            f"have at most {TYPE_CHARACTERS_MAX} characters; it is {value[:200]!r}",
        )


def _check_event_id(value: str) -> None:
    """Raise InvalidArgument unless every backend can carry the ID."""
    if not _EVENT_ID.fullmatch(value):
        raise InvalidArgument(
            "id",
            f"must be 1 to {EVENT_ID_CHARACTERS_MAX} printable ASCII characters without spaces, "
            f"not {value[:200]!r}",
        )


@lru_cache(TIMESTAMPS_KEPT)
def format_timestamp(at_ms: int) -> str:
    """ISO 8601 in UTC with milliseconds, as in 2026-02-22T12:00:00.000Z; at most LAST_DATE_MS."""
    seconds, ms = divmod(min(at_ms, LAST_DATE_MS), 1000)
    at = datetime.fromtimestamp(seconds, UTC).replace(tzinfo=None)
    return f"{at.isoformat()}.{ms:03d}Z"


@lru_cache(TIMESTAMPS_KEPT)
def parse_timestamp(field: str, text: str) -> int:
    """Milliseconds since the Unix epoch, up to LAST_DATE_MS. Raises InvalidArgument."""
    try:
        at = datetime.fromisoformat(text)
        if at.tzinfo is None or at < _EPOCH:
            raise ValueError(text)
        at_ms = round(at.timestamp() * 1000)
        if at_ms > LAST_DATE_MS:
            raise ValueError(text)
    except (ValueError, OverflowError) as error:
        raise InvalidArgument(
            field,
            "must be ISO 8601 with a time zone, like 2026-02-22T12:00:00.000Z, in the years 1970 "
            f"to 9999 of UTC; it is {text!r}",
        ) from error
    return at_ms
