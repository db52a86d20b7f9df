"""Messages on their way out: their wire form, their size, and errors about one of many."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from slatemq._checks import check_kind, check_text, wrong
from slatemq._requests import check_field
from slatemq._rpc.wire_format import (
    SHORT_CONTENT,
    SHORT_LENGTH,
    framed,
    framed_each,
    tag_of,
    varint,
)
from slatemq.errors import InvalidArgument
from slatemq.models import OutgoingMessage
from slatemq.v1 import ingest_pb2


def size_of(message: OutgoingMessage) -> int:
    """About the bytes of a message in a request. Raises InvalidArgument for what has none."""
    try:
        size = len(message.payload) + 64
        if message.headers:
            size += sum(len(key) + len(value) + 8 for key, value in message.headers.items())
    except (TypeError, AttributeError) as error:
        raise _named(error, message, "") from None
    return size


def check(message: OutgoingMessage, where: str = "") -> None:
    """Raises InvalidArgument about the first field that cannot be sent."""
    if not isinstance(message, OutgoingMessage):
        raise wrong(where.rstrip(".") or "message", "an OutgoingMessage", message)
    if not isinstance(message.payload, bytes):
        raise wrong(where + "payload", "bytes or text", message.payload)
    if message.headers is not None:
        check_kind(where + "headers", message.headers, Mapping, "a mapping of text to text")
    for name, value in message._asdict().items():
        if name not in ("payload", "dedupe_key") and value is not None:
            check_field(ingest_pb2.PublishRun, name, value, where + name)
    if message.dedupe_key is not None:
        check_text(where + "dedupe_key", message.dedupe_key)
        if not message.dedupe_key:
            raise InvalidArgument(
                f"{where}dedupe_key", "must be 1 to 255 bytes, not empty; None stands for no key"
            )


def _named(error: Exception, message: OutgoingMessage, where: str) -> InvalidArgument:
    """Which field of a message could not be set; `where` ends with a dot, or is empty."""
    # Another type, text that is not UTF-8, or a number beyond 64 bits.
    try:
        check(message, where)
    except InvalidArgument as problem:
        return problem
    return InvalidArgument(where.rstrip(".") or "message", str(error))


class Runs:
    """Messages of one request, in runs: neighbours that differ only in payload and dedupe key.

    A message that is like the one before costs its payload and a comparison: a tenth of the time
    that protobuf's own objects take.

    Attributes:
        size_bytes: The size of the request, if each message were a run of its own.
    """

    __slots__ = (
        "_commons",
        "_count",
        "_encoded",
        "_keys",
        "_last",
        "_payloads",
        "_repeated_bytes",
        "size_bytes",
    )

    def __init__(self, before: Runs | None = None) -> None:
        """`before`: a request whose last message may be like the first one here."""
        self.size_bytes = 0
        self._count = 0
        # The last message, without payload and key, and the same encoded.
        self._last: tuple[Any, ...] = () if before is None else before._last
        self._encoded: bytes = b"" if before is None else before._encoded
        # What the messages behind the first of their run have in common; too much to begin with.
        self._repeated_bytes = REPEATED_BYTES_MAX + 1
        # Of each run all but payloads and keys, encoded; and its payloads.
        self._commons: list[bytes] = []
        self._payloads: list[list[bytes]] = []
        self._keys: dict[int, str] = {}  # by the message's place in the request

    def __len__(self) -> int:
        return self._count

    def add(self, message: OutgoingMessage, where: str, bytes_max: int | None = None) -> bool:
        """Adds one message, unless there are others and it would be too large beside them.

        Raises InvalidArgument for values that have no wire form; its field begins with `where`.
        """
        if type(message) is not OutgoingMessage or type(message[0]) is not bytes:
            check(message, where)
        payload, key, last = message[0], message[6], message[1:6]
        is_alike = last == self._last
        common = self._encoded if is_alike else _common_of(message, where)
        size = len(payload) + len(common) + _FRAME_BYTES
        if key is not None:
            if type(key) is not str or not key or not key.isascii():
                check(message, where)
            size += len(key.encode()) + _KEY_FRAME_BYTES
        if bytes_max is not None and self._count and self.size_bytes + size > bytes_max:
            return False
        if key is not None:
            self._keys[self._count] = key
        repeated_bytes = self._repeated_bytes + len(common)
        if is_alike and repeated_bytes <= REPEATED_BYTES_MAX:
            self._payloads[-1].append(payload)
            self._repeated_bytes = repeated_bytes
        else:
            if not is_alike:
                # A copy: the caller may change one mapping for message after message.
                self._last = (dict(last[0] or ()), *last[1:])
                self._encoded = common
            if not self._count:
                self._repeated_bytes = 0
            self._commons.append(common)
            self._payloads.append([payload])
        self._count += 1
        self.size_bytes += size
        return True

    @property
    def is_repeating(self) -> bool:
        """Whether the last messages were alike, so that the next ones may be, too."""
        return len(self._payloads[-1]) >= _REPEATING_FROM

    def add_alike(
        self, messages: Iterator[OutgoingMessage], count_max: int, bytes_max: int
    ) -> tuple[int, OutgoingMessage | None]:
        """Adds the messages that come next, as long as they are like the last one and have no key.

        At most `count_max`, and no more than fit into `bytes_max`. Returns how many it added, and
        the message behind them, which it did not; None = there is none. As `add` does, in half of
        the time; of few messages, in more: see `is_repeating`.
        """
        alike, common_bytes = (*self._last, None), len(self._encoded)
        fixed_bytes = common_bytes + _FRAME_BYTES
        left_bytes = bytes_max - self.size_bytes
        if common_bytes:
            left_count = (REPEATED_BYTES_MAX - self._repeated_bytes) // common_bytes
            count_max = min(count_max, left_count)
        payloads = list[bytes]()
        following = None
        for message in messages:
            if (
                type(message) is not OutgoingMessage
                or message[1:] != alike
                or type(payload := message[0]) is not bytes
                or len(payloads) >= count_max
                or left_bytes < len(payload) + fixed_bytes
            ):
                following = message
                break
            left_bytes -= len(payload) + fixed_bytes
            payloads.append(payload)
        self.size_bytes = bytes_max - left_bytes
        self._repeated_bytes += common_bytes * len(payloads)
        self._payloads[-1] += payloads
        self._count += len(payloads)
        return len(payloads), following

    def extend(self, others: Runs) -> None:
        """Adds the messages of `others`, which must not be used afterwards."""
        self._keys.update((self._count + place, key) for place, key in others._keys.items())
        self._commons += others._commons
        self._payloads += others._payloads
        self._count += others._count
        self.size_bytes += others.size_bytes
        self._last = ()

    def encoded(self, request_id: str = "") -> bytes:
        """A PublishRequest with this ID."""
        parts = [framed(_REQUEST_ID, request_id.encode())] if request_id else []
        first = 0
        for run, payloads in enumerate(self._payloads):
            common = self._commons[run]
            if self._keys:
                common += self._encoded_keys(range(first, first + len(payloads)))
                first += len(payloads)
            if len(payloads) == 1:
                # As below, in half of the time: a request may have no longer ones.
                (payload,) = payloads
                head = _PAYLOADS + varint(len(payload))
                length = varint(len(head) + len(payload) + len(common))
                parts += (_RUNS, length, head, payload, common)
                continue
            pieces = framed_each(_PAYLOADS, payloads)
            parts += (_RUNS, varint(sum(map(len, pieces)) + len(common)), *pieces, common)
        return b"".join(parts)

    def _encoded_keys(self, places: range) -> bytes:
        """The keys of a run; empty where none of its messages has one."""
        keys = [self._keys.get(place, "").encode() for place in places]
        if not any(keys):
            return b""
        return b"".join(framed(_DEDUPE_KEYS, key) for key in keys)

    @property
    def dedupe_keys(self) -> list[str | None]:
        """The key of each message; empty where none has one."""
        return [self._keys.get(place) for place in range(self._count)] if self._keys else []

    def only(self, places: Iterable[int]) -> Runs:
        """Some of the messages."""
        each = [(run, payload) for run, some in enumerate(self._payloads) for payload in some]
        chosen = Runs()
        last = -1
        for place in places:
            run, payload = each[place]
            if run != last:
                chosen._commons.append(self._commons[run])
                chosen._payloads.append([])
                last = run
            chosen._payloads[-1].append(payload)
            if place in self._keys:
                chosen._keys[chosen._count] = self._keys[place]
            chosen._count += 1
        return chosen

    def change_headers(self, change: Callable[[MutableMapping[str, str]], None]) -> None:
        """Changes the headers of all messages."""
        for run, common in enumerate(self._commons):
            wire = ingest_pb2.PublishRun.FromString(common)
            change(wire.headers)
            self._commons[run] = wire.SerializeToString()
        self._last = ()

    def places_of(self, field: str) -> tuple[range, str] | None:
        """The messages that an error of the server is about, and the part of them that is wrong."""
        named = _RUN.fullmatch(field)
        if named is None or int(named["run"]) >= len(self._payloads):
            return None
        run = int(named["run"])
        first = sum(map(len, self._payloads[:run]))
        if named["place"] is None:
            return range(first, first + len(self._payloads[run])), named["common"] or ""
        place = first + int(named["place"])
        return range(place, place + 1), "payload" if named["payloads"] else "dedupe_key"


def numbered(number: int, request: bytes, timeout_ms: int) -> bytes:
    """A PublishStreamRequest with this number, encoded PublishRequest and time for its answer."""
    length, timeout = varint(len(request)), varint(timeout_ms)
    return b"".join((_NUMBER, varint(number), _PUBLISH, length, request, _TIMEOUT_MS, timeout))


def _common_of(message: OutgoingMessage, where: str) -> bytes:
    """A message without payload and dedupe key, encoded. Raises InvalidArgument.

    Headers are encoded by hand: in half of the time that protobuf's own map takes.
    """
    encoded = b""
    headers: Any = message[1]
    try:
        for name, value in () if headers is None else headers.items():
            raw_name, raw_value = name.encode(), value.encode()
            name_size, value_size = len(raw_name), len(raw_value)
            if name_size + value_size < _SHORT_HEADER_BYTES:
                size = name_size + value_size + 4
                encoded += _SHORT_HEADER % (size, name_size, raw_name, value_size, raw_value)
            else:
                entry = framed(_NAME, raw_name) + framed(_VALUE, raw_value)
                encoded += framed(_HEADERS, entry)
        if message[2:6] == _NO_NUMBERS:
            return encoded
        numbers = ingest_pb2.PublishRun(
            created_at_ms=message.created_at_ms,
            retention_s=message.retention_s,
            delay_ms=message.delay_ms,
            visible_at_ms=message.visible_at_ms,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise _named(error, message, where) from None
    return encoded + numbers.SerializeToString()


_NO_NUMBERS: Final = OutgoingMessage(b"")[2:6]

REPEATED_BYTES_MAX: Final = 2 << 20
"""What the messages behind the first of each run have in common, counted for each: the server takes
twice as many headers."""

_REPEATING_FROM: Final = 4
"""Messages of a run after which a try to add more at once is likely to pay."""

_FRAME_BYTES: Final = 12
"""At most, of what stands around a message and its payload."""

_KEY_FRAME_BYTES: Final = 3
"""At most, of what stands before a dedupe key."""

_RUN: Final = re.compile(
    r"runs\[(?P<run>\d+)\]"
    r"(\.((?P<payloads>payloads)|dedupe_keys)\[(?P<place>\d+)\].*|\.(?P<common>.*))?",
    re.DOTALL,
)


_REQUEST_ID: Final = tag_of(ingest_pb2.PublishRequest, "request_id")
_RUNS: Final = tag_of(ingest_pb2.PublishRequest, "runs")
_PAYLOADS: Final = tag_of(ingest_pb2.PublishRun, "payloads")
_DEDUPE_KEYS: Final = tag_of(ingest_pb2.PublishRun, "dedupe_keys")
_HEADERS: Final = tag_of(ingest_pb2.PublishRun, "headers")
_NAME: Final = tag_of(ingest_pb2.PublishRun.HeadersEntry, "key")
_VALUE: Final = tag_of(ingest_pb2.PublishRun.HeadersEntry, "value")

_SHORT_HEADER: Final = _HEADERS + SHORT_LENGTH + _NAME + SHORT_CONTENT + _VALUE + SHORT_CONTENT
_SHORT_HEADER_BYTES: Final = 0x80 - 4
"""Lengths below 0x80 take one byte, and four bytes stand around name and value."""
_NUMBER: Final = tag_of(ingest_pb2.PublishStreamRequest, "number")
_PUBLISH: Final = tag_of(ingest_pb2.PublishStreamRequest, "publish")
_TIMEOUT_MS: Final = tag_of(ingest_pb2.PublishStreamRequest, "timeout_ms")
