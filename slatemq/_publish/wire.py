"""Messages on their way out: their wire form, their size, and errors about one of many."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

from slatemq._checks import check_field, wrong
from slatemq.errors import InvalidArgument
from slatemq.models import OutgoingMessage
from slatemq.v1 import ingest_pb2

PLACE = re.compile(r"messages\[(\d+)\]\.?(.*)", re.DOTALL)
"""The message and its part that an error of the server names."""


def size_of(message: OutgoingMessage, where: str = "") -> int:
    """About the bytes of a message in a request.

    Raises InvalidArgument for what has none; its field begins with `where`.
    """
    try:
        size = len(message.payload) + 64
        if message.headers:
            size += sum(len(key) + len(value) + 8 for key, value in message.headers.items())
    except (TypeError, AttributeError) as error:
        raise _named(error, message, where) from None
    return size


def check(message: OutgoingMessage, where: str = "") -> None:
    """Raises InvalidArgument about the first field that cannot be sent."""
    if not isinstance(message, OutgoingMessage):
        raise wrong(where.rstrip(".") or "message", "an OutgoingMessage", message)
    for name, value in message._asdict().items():
        if value is None and name in ("payload", "headers"):
            raise wrong(where + name, "bytes or text" if name == "payload" else "a mapping", value)
        check_field(ingest_pb2.PublishMessage, name, value, where + name)
    if message.dedupe_key == "":
        raise InvalidArgument(
            f"{where}dedupe_key", "must be 1 to 255 bytes, not empty; None stands for no key"
        )


def add(request: ingest_pb2.PublishRequest, message: OutgoingMessage) -> None:
    """Adds a message to a request, or nothing. Raises InvalidArgument for what has no wire form."""
    before = len(request.messages)
    try:
        _fill(request.messages.add(payload=message.payload), message)
    except (TypeError, ValueError, AttributeError) as error:
        del request.messages[before:]
        raise _named(error, message, f"messages[{before}].") from None


def _fill(wire: ingest_pb2.PublishMessage, message: OutgoingMessage) -> None:
    """Sets all but the payload. Raises what `_named` translates."""
    if message.headers:
        if _has_bytes(message.headers):
            raise TypeError("bytes are not text")  # protobuf would take them.
        wire.headers.update(message.headers)
    if message[2:] == _NOTHING_ELSE:
        return
    if message.created_at_ms is not None:
        wire.created_at_ms = message.created_at_ms
    if message.retention_s is not None:
        wire.retention_s = message.retention_s
    if message.delay_ms is not None:
        wire.delay_ms = message.delay_ms
    if message.visible_at_ms is not None:
        wire.visible_at_ms = message.visible_at_ms
    if message.dedupe_key is not None:
        wire.dedupe_key = message.dedupe_key
        if not message.dedupe_key:
            raise ValueError("an empty key")


def _has_bytes(headers: Mapping[Any, Any]) -> bool:
    return bytes in map(type, headers) or bytes in map(type, headers.values())


def _named(error: Exception, message: OutgoingMessage, where: str) -> InvalidArgument:
    """Which field of a message could not be set; `where` ends with a dot, or is empty."""
    # Another type, text that is no UTF-8, or a number beyond 64 bits.
    try:
        check(message, where)
    except InvalidArgument as problem:
        return problem
    return InvalidArgument(where.rstrip(".") or "message", str(error))


_NOTHING_ELSE: Final[tuple[Any, ...]] = OutgoingMessage(b"")[2:]


class Runs:
    """Messages of one request, run by run: those in a row that differ in their payloads alone.

    Whatever is like the message before costs its payload and a comparison; a tenth of the time that
    protobuf's own objects take.

    Attributes:
        size_bytes: Of the request, if each message stands for itself.
        has_keys: Whether a message has a dedupe key: such are no runs to the server.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.has_keys = False
        self._count = 0
        self._common: tuple[Any, ...] = ()  # what the last message had beside its payload
        self._each_bytes = 0  # of a message like it, beside its payload
        self._payloads: list[bytes] = []
        self._runs: list[tuple[bytes, list[bytes]]] = []

    def __len__(self) -> int:
        return self._count

    def add(self, message: OutgoingMessage, where: str, bytes_max: int | None = None) -> bool:
        """Adds one message, unless there are others and it would be too large beside them.

        Raises InvalidArgument for what has no wire form; its field begins with `where`.
        """
        is_alike = (
            type(message) is OutgoingMessage
            and message[1:] == self._common
            and type(message.payload) is bytes
        )
        common = b"" if is_alike else _common_of(message, where)
        payload = message.payload
        each_bytes = self._each_bytes if is_alike else len(common) + _FRAME_BYTES
        size = len(payload) + each_bytes
        if bytes_max is not None and self._count and self.size_bytes + size > bytes_max:
            return False
        if not is_alike:
            self.has_keys |= message.dedupe_key is not None
            # A copy: whoever gives messages one by one may use one mapping for all.
            self._common = (dict(message.headers or ()), *message[2:])
            self._each_bytes = each_bytes
            self._payloads = []
            self._runs.append((common, self._payloads))
        self._payloads.append(payload)
        self._count += 1
        self.size_bytes += size
        return True

    @property
    def are_runs(self) -> bool:
        """Whether it goes as runs: not where most messages differ, or headers are many."""
        headers_bytes = sum(len(common) * len(payloads) for common, payloads in self._runs)
        are_alike = 0 < 2 * len(self._runs) <= self._count
        return are_alike and headers_bytes <= HEADERS_BYTES_MAX

    def encoded(self, request_id: str = "") -> bytes:
        """A request with this ID."""
        raw = request_id.encode()
        parts = [_REQUEST_ID, _varint(len(raw)), raw] if raw else []
        if not self.are_runs:
            return b"".join([*parts, *self._as_messages()])
        for common, payloads in self._runs:
            head = _COMMON + _varint(len(common)) + common
            sizes = list(map(len, payloads))
            heads = {size: _PAYLOADS + _varint(size) for size in set(sizes)}
            framed = [b""] * (2 * len(payloads))
            framed[0::2] = map(heads.__getitem__, sizes)
            framed[1::2] = payloads
            length = len(head) + sum(map(len, framed))
            parts += (_RUNS, _varint(length), head, *framed)
        return b"".join(parts)

    def request(self) -> ingest_pb2.PublishRequest:
        """The same, each message for itself."""
        return ingest_pb2.PublishRequest.FromString(b"".join(self._as_messages()))

    def _as_messages(self) -> list[bytes]:
        encoded: list[bytes] = []
        for common, payloads in self._runs:
            for payload in payloads:
                size = _varint(len(payload))
                length = _varint(1 + len(size) + len(payload) + len(common))
                encoded += (_MESSAGES, length, _PAYLOAD, size, payload, common)
        return encoded

    def only(self, places: Iterable[int]) -> Runs:
        """Some of the messages."""
        each = [(common, payload) for common, payloads in self._runs for payload in payloads]
        chosen = Runs()
        chosen.has_keys = self.has_keys
        chosen._runs = [(common, [payload]) for common, payload in map(each.__getitem__, places)]
        chosen._count = len(chosen._runs)
        return chosen

    def place_of(self, field: str) -> tuple[int, str] | None:
        """The message that an error about a run names, and what of it."""
        named = _RUN.fullmatch(field)
        if named is None or int(named["run"]) >= len(self._runs):
            return None
        run = int(named["run"])
        before = sum(len(payloads) for _, payloads in self._runs[:run])
        if named["payload"]:
            return before + int(named["payload"]), "payload"
        return before, named["common"] or ""


def _common_of(message: OutgoingMessage, where: str) -> bytes:
    """A message without its payload. Raises InvalidArgument."""
    if type(message) is not OutgoingMessage or type(message.payload) is not bytes:
        check(message, where)
    common = ingest_pb2.PublishMessage()
    try:
        _fill(common, message)
    except (TypeError, ValueError, AttributeError) as error:
        raise _named(error, message, where) from None
    return common.SerializeToString()


HEADERS_BYTES_MAX: Final = 2 << 20
"""Of all messages in runs; the server takes twice as many."""

_FRAME_BYTES: Final = 12
"""At most, of what stands around a message and its payload."""

_RUN: Final = re.compile(
    r"runs\[(?P<run>\d+)\](\.payloads\[(?P<payload>\d+)\]|\.common\.(?P<common>.*))?.*", re.DOTALL
)


def _tag(message: Any, name: str) -> bytes:
    """What stands before a field that has a length."""
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


@lru_cache(maxsize=4096)
def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


_MESSAGES: Final = _tag(ingest_pb2.PublishRequest, "messages")
_REQUEST_ID: Final = _tag(ingest_pb2.PublishRequest, "request_id")
_RUNS: Final = _tag(ingest_pb2.PublishRequest, "runs")
_PAYLOAD: Final = _tag(ingest_pb2.PublishMessage, "payload")
_COMMON: Final = _tag(ingest_pb2.PublishRun, "common")
_PAYLOADS: Final = _tag(ingest_pb2.PublishRun, "payloads")


def moved(error: InvalidArgument, field: str) -> InvalidArgument:
    """The same error about another field: who published one message knows of no batch."""
    return InvalidArgument(
        field.rstrip("."), error.description, reason=error.reason, metadata=error.metadata
    )
