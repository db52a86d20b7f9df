"""The client's arguments and results: plain frozen values; times are in ms where stored."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from slatemq._checks import WHOLE_MAX, check_kind, check_text, check_whole, wrong
from slatemq.errors import InvalidArgument

if TYPE_CHECKING:
    from slatemq.encryption import DataKey, KeyRing

MESSAGES_MAX = 10_000
"""Messages that the server takes in one publish."""

REASON_BYTES_MAX = 1024
DELAY_MS_MAX = 43_200_000
"""Bounds of the server on what is given back: one item beyond them refuses a whole call."""

Duration = float | timedelta
"""A length of time: seconds, or a timedelta."""

Time = int | datetime
"""A point in time: milliseconds since the Unix epoch, or a datetime with a time zone."""


class OutgoingMessage(NamedTuple):
    """A message to publish.

    `created_at_ms` None: the time of receipt; `retention_s` None: the instance's default, 0: for
    ever. `delay_ms` counts in delayed queues only, `visible_at_ms` in all; not both. Of messages
    with the same `dedupe_key` within the instance's window, one is stored.
    """

    payload: bytes
    headers: Mapping[str, str] = {}
    created_at_ms: int | None = None
    retention_s: int | None = None
    delay_ms: int | None = None
    visible_at_ms: int | None = None
    dedupe_key: str | None = None


class BatchSettings(NamedTuple):
    """How single publishes are gathered into requests.

    A request goes out when it has `messages_max` messages or `payload_bytes_max` bytes, or when
    its oldest message has waited for `linger_s` and none is under way to its shard: so one message
    goes at once, and what is published until its answer goes together. At most `requests_max` are
    under way, and at most `outstanding_bytes_max` of payloads wait in memory: `publish` waits above
    that.
    """

    messages_max: int = 1000
    payload_bytes_max: int = 4 << 20
    linger_s: float = 0.0
    requests_max: int = 4
    outstanding_bytes_max: int = 64 << 20

    def check(self) -> None:
        """Raises InvalidArgument for settings that could not work."""
        check_whole("messages_max", self.messages_max, 1, MESSAGES_MAX)
        for name in ("payload_bytes_max", "requests_max", "outstanding_bytes_max"):
            check_whole(name, getattr(self, name), 1)
        check_kind("linger_s", self.linger_s, int | float, "seconds")
        seconds(self.linger_s, "linger_s")


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a message would reach a queue, with which priority, and why.

    `waits`: the queue is in quarantine, so the message would wait in the log, and be judged later.
    """

    queue_id: str
    matched: bool
    priority: int
    reason: str
    waits: bool = False


@dataclass(frozen=True, slots=True)
class AccessRule:
    """What one rule of the policy says.

    Attributes:
        place: Where it stands: `roles.shop[0]` is the first rule of the role `shop`.
        line: Its line in the policy file.
        binding: By which the principal has it, as in `bindings[1]`.
        binding_line: The line of that.
        finding: `permits`, `other_queues`, `condition_false` or `condition_failed`.
        detail: Its queues, or its condition with the values that it read.
    """

    place: str
    line: int
    binding: str
    binding_line: int
    finding: str
    detail: str


@dataclass(frozen=True, slots=True)
class AccessCheck:
    """Whether a policy permits something, and why.

    Attributes:
        permitted: Whether it does.
        reason: Why, in a sentence.
        rules: Those with the verb that the principal has. The last is the one that permits it.
        roles: That are bound to the principal.
        policy_file: The file, as the process that answered names it.
        policy_version: How many versions of it that process has loaded.
        loaded_at_ms: When it loaded this one, in ms since the Unix epoch.
        address: Of that process.
    """

    permitted: bool
    reason: str
    rules: Sequence[AccessRule]
    roles: Sequence[str]
    policy_file: str
    policy_version: int
    loaded_at_ms: int
    address: str


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One process.

    `detail`: why it does not serve, or, for callers that may operate, what holds up its callers.
    `instance_number`: the record of the instance's settings that it runs with; 0 = it did not say.
    `open_without`: what it lacks although other machines can reach it: `TLS`, `policy`,
    `TLS for /s3-events`.
    """

    service: str
    shard: int
    address: str
    serving: bool
    detail: str = ""
    instance_number: int = 0
    open_without: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteStatus:
    """How far one log is routed to one broker shard.

    `is_current`: whether the router knows the log's end; where its ingest is down, what the log has
    behind `durable_sequence` is unknown, and not in `pending_count`.
    """

    ingest_shard: int
    broker_shard: int
    cursor: int
    durable_sequence: int
    pending_count: int
    is_current: bool = True


@dataclass(frozen=True)
class Topology:
    """The advertised addresses of all processes, by shard.

    Attributes:
        draining_ingests: The ingest shards that take no publishes, since they are being drained.
    """

    ingests: Mapping[int, str]
    brokers: Mapping[int, str]
    routers: Mapping[int, str]
    janitors: Mapping[int, str]
    draining_ingests: frozenset[int] = frozenset()

    @cached_property
    def open_ingests(self) -> list[int]:
        """The ingest shards that take publishes, in ascending order."""
        return sorted(self.ingests.keys() - self.draining_ingests)

    def processes(self) -> Iterator[tuple[str, int, str]]:
        """The service, shard and address of each process."""
        for service, addresses in (
            ("ingest", self.ingests),
            ("router", self.routers),
            ("broker", self.brokers),
            ("janitor", self.janitors),
        ):
            for shard, address in sorted(addresses.items()):
                yield service, shard, address


def seconds(span: Duration, field: str = "") -> float:
    """A length of time in seconds; raises InvalidArgument about `field` for what is none."""
    length = span.total_seconds() if isinstance(span, timedelta) else span
    if isinstance(length, bool) or not isinstance(length, int | float):
        raise wrong(field, "seconds or a timedelta", span)
    try:
        length = float(length)
    except OverflowError:
        raise InvalidArgument(field, "is too large") from None
    if not length >= 0:
        raise InvalidArgument(field, f"must be 0 s or more, not {length:g} s")
    return length


def milliseconds(span: Duration, field: str = "") -> int:
    """A length of time in whole milliseconds, a positive one at least 1; raises as `seconds`."""
    length = seconds(span, field)
    if not isfinite(length):
        raise InvalidArgument(field, f"must be a finite length of time, not {length}")
    return _whole(field, round(length * 1000) or (1 if length > 0 else 0))


def time_ms(time: Time, field: str = "") -> int:
    """A point in time in milliseconds since the Unix epoch.

    Raises InvalidArgument about `field`, also for a datetime without a time zone, which
    is ambiguous.
    """
    if not isinstance(time, datetime):
        if isinstance(time, bool) or not isinstance(time, int):
            raise wrong(field, "milliseconds since 1970 (a whole number) or a datetime", time)
        return _whole(field, time)
    if time.tzinfo is None:
        rule = "must be a datetime with a time zone, e.g. datetime.now(UTC)"
        raise InvalidArgument(field, rule)
    return round((time - _EPOCH) / timedelta(milliseconds=1))


def _whole(field: str, number: int) -> int:
    check_whole(field, number, -WHOLE_MAX - 1)
    return number


def now_ms() -> int:
    """The time by the clock of this machine, in milliseconds since the Unix epoch."""
    return time.time_ns() // 1_000_000


def optional_ms(time: Time | None, field: str) -> int | None:
    """Like `time_ms`; None for None."""
    return None if time is None else time_ms(time, field)


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


Payload = bytes | str | bytearray | memoryview
"""What a message carries; text is sent as UTF-8."""


def payload_bytes(payload: Payload, field: str = "payload") -> bytes:
    """The bytes to send. Raises InvalidArgument for text that is not UTF-8."""
    if isinstance(payload, str):
        try:
            return payload.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(field, f"must be UTF-8 text: {error}") from None
    if isinstance(payload, bytearray | memoryview):
        return bytes(payload)
    return payload


def outgoing(
    payload: Payload,
    headers: Mapping[str, str] | None = None,
    created_at: Time | None = None,
    retention: Duration | None = None,
    *,
    delay: Duration | None = None,
    visible_at: Time | None = None,
    dedupe_key: str | None = None,
) -> OutgoingMessage:
    """A message to publish, from what `Client.publish` takes."""
    return OutgoingMessage(
        payload if type(payload) is bytes else payload_bytes(payload),
        {} if headers is None else _headers(headers),
        time_ms(created_at, "created_at") if created_at is not None else None,
        whole_seconds("retention", retention) if retention is not None else None,
        milliseconds(delay, "delay") if delay is not None else None,
        time_ms(visible_at, "visible_at") if visible_at is not None else None,
        dedupe_key,
    )


def _headers(headers: Mapping[str, str]) -> dict[str, str]:
    check_kind("headers", headers, Mapping, "a mapping of text to text")
    return dict(headers)


def whole_seconds(name: str, span: Duration) -> int:
    """A length of time in seconds; raises InvalidArgument naming the field when it is not whole."""
    length = seconds(span, name)
    if not isfinite(length) or length != int(length):
        raise InvalidArgument(name, "must be a whole number of seconds")
    return _whole(name, int(length))


def bounded_delay_ms(delay: Duration) -> int:
    """A delay of a message given back, in ms. Raises InvalidArgument beyond 12 h."""
    delay_ms = milliseconds(delay, "delay")
    if delay_ms > DELAY_MS_MAX:
        raise InvalidArgument(
            "delay", f"must be 0 to 12 hours, not {delay_ms / 1000:,g} s", reason="OUT_OF_RANGE"
        )
    return delay_ms


def cut_reason(reason: str, field: str = "reason") -> str:
    """A reason, cut where it is too long; raises InvalidArgument where it is not text."""
    check_text(field, reason)
    return reason.encode("utf-8", "replace")[:REASON_BYTES_MAX].decode("utf-8", "ignore")


def sealer_of(
    encryption: KeyRing | None, request_id: str, payloads: Iterable[Payload]
) -> KeyRing | DataKey | None:
    """What encrypts the payloads of a request: alike each time, where its caller may repeat it."""
    if encryption is None or not request_id:
        return encryption
    return encryption.for_request(request_id, map(payload_bytes, payloads))


def sealed(message: OutgoingMessage, sealer: KeyRing | DataKey | None) -> OutgoingMessage:
    """The message with its payload encrypted, where there are keys."""
    if sealer is None:
        return message
    payload, headers = sealer.seal(message.payload, message.headers or {})
    return message._replace(payload=payload, headers=headers)
