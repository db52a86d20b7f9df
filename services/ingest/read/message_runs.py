"""Messages in runs, encoded for BatchGetMessages, and how many of them a response has room for.

Neighbours differ in little but their payloads. What the messages of a run have in common is a
`Message` of message.proto in protobuf's wire format. No object is made per message
(docs/decisions/0015-messages-as-bytes.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from operator import ne
from typing import Any, Final, NamedTuple

from libs.storage.records.metadata import MessageMetadata
from services.ingest.batches import NOT_SET, select
from services.ingest.read.payload_cache import CachedRun
from slatemq._rpc.wire_format import framed_each, number_field, tag_of, varint
from slatemq.v1.ingest_pb2 import BatchGetMessagesResponse, StoredRun
from slatemq.v1.message_pb2 import Message


class ResponseBudget:
    """The space left in a response: the first message of any size, then up to the bounds.

    `payload_bytes` bounds the payloads, `answer_bytes` payloads and headers together.
    """

    __slots__ = ("_answer_bytes", "_empty", "_payload_bytes")

    def __init__(self, payload_bytes: int, answer_bytes: int) -> None:
        self._payload_bytes = payload_bytes
        self._answer_bytes = answer_bytes
        self._empty = True

    def copy(self) -> ResponseBudget:
        other = ResponseBudget(0, 0)
        other.become(self)
        return other

    def become(self, other: ResponseBudget) -> None:
        self._payload_bytes = other._payload_bytes
        self._answer_bytes = other._answer_bytes
        self._empty = other._empty

    def take(self, payload_bytes: int, about_bytes: int) -> bool:
        """Whether a message fits, with `about_bytes` of headers and numbers; counts it."""
        self._payload_bytes -= payload_bytes
        self._answer_bytes -= payload_bytes + about_bytes + _FIXED_BYTES
        fits = self._empty or (self._payload_bytes >= 0 and self._answer_bytes >= 0)
        self._empty = False
        return fits

    def take_all(self, payload_bytes: int, other_bytes: int, count: int) -> bool:
        """Whether `count` messages that are alike fit; counts them if they do."""
        answer_bytes = payload_bytes + other_bytes + count * _FIXED_BYTES
        if payload_bytes > self._payload_bytes or answer_bytes > self._answer_bytes:
            return False
        self._payload_bytes -= payload_bytes
        self._answer_bytes -= answer_bytes
        self._empty = False
        return True


_FIXED_BYTES: Final = 64
"""Tags, lengths and numbers of a message or a header on the wire, at most."""


def fitting(
    message_ids: Iterable[int], found: Mapping[int, MessageMetadata], room: ResponseBudget
) -> Iterator[int]:
    """The IDs before the first message that no longer fits; missing ones take no space."""
    headers: Mapping[str, str] | None = None
    about_bytes = 0
    for message_id in message_ids:
        metadata = found.get(message_id)
        if metadata is not None:
            if metadata.headers is not headers:  # neighbours share theirs
                headers = metadata.headers
                # A character has at most 4 bytes of UTF-8, and counting them all costs more.
                about_bytes = sum(
                    4 * (len(key) + len(value)) + _FIXED_BYTES for key, value in headers.items()
                )
            if not room.take(metadata.payload_bytes, about_bytes):
                return
        yield message_id


_RUNS: Final = tag_of(BatchGetMessagesResponse, "runs")
_PAYLOADS: Final = tag_of(StoredRun, "payloads")
_CREATED_AT: Final = tag_of(Message, "created_at_ms")


class MessageRun(NamedTuple):
    """Messages in a row that have all but their IDs, payloads and etags in common."""

    common: bytes
    message_ids: list[int]
    payloads: list[bytes]
    etags: list[str]

    def fields(self) -> list[bytes]:
        """The encoded run as one of a response's `runs`, in pieces."""
        pieces = framed_each(_PAYLOADS, self.payloads)
        others = StoredRun(
            common=self.common, message_ids=self.message_ids, etags=self.etags
        ).SerializeToString()
        size = len(others) + sum(map(len, pieces))
        return [_RUNS + varint(size) + others, *pieces]


class ReadResult(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    `damaged_ids` are among `missing_ids`. The payloads of slow ones are still being read, or
    cannot be read until a file of the store is restored: they are neither in a run nor missing.
    """

    runs: list[MessageRun]
    missing_ids: list[int]
    damaged_ids: list[int]
    slow_ids: list[int]

    def add(
        self, common: bytes, message_ids: list[int], payloads: list[bytes], etags: Sequence[str]
    ) -> None:
        """Append messages, to the last run where they share its common fields."""
        if not self.runs or self.runs[-1].common != common:
            self.runs.append(MessageRun(common, [], [], []))
        run = self.runs[-1]
        run.message_ids.extend(message_ids)
        run.payloads.extend(payloads)
        run.etags.extend(etags)

    def encode(self) -> bytes:
        """An encoded BatchGetMessagesResponse."""
        response = BatchGetMessagesResponse(
            missing_ids=self.missing_ids, damaged_ids=self.damaged_ids, slow_ids=self.slow_ids
        )
        fields = [piece for run in self.runs for piece in run.fields()]
        return b"".join([*fields, response.SerializeToString()])


def common_stretches(run: CachedRun, offsets: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Split messages of a cached run where their common fields change.

    Yields the end of each stretch, counted in `offsets`, and the common fields of its messages.
    """
    columns, count = run.columns, len(offsets)
    headers = select(columns.header_bytes, offsets)
    times = select(columns.created_at_ms, offsets)
    retentions = select(columns.retention_s, offsets)
    ends = [count]
    columns_of_run: tuple[list[Any], ...] = (headers, times, retentions)
    if count > 1 and any(column.count(column[0]) < count for column in columns_of_run):
        rows = list(zip(headers, times, retentions, strict=True))
        ends = [*compress(range(1, count), map(ne, rows, rows[1:])), count]
    start, rest = 0, b""
    known: tuple[bytes, int] | None = None
    for end in ends:
        # Where each message has a time of its own, the rest is the same for most.
        if known != (headers[start], retentions[start]):
            known = (headers[start], retentions[start])
            rest = Message(
                headers=columns.headers[offsets[start]],
                received_at_ms=run.received_at_ms,
                retention_s=retentions[start],
            ).SerializeToString()
        created_at_ms = run.received_at_ms if times[start] == NOT_SET else times[start]
        yield end, rest + number_field(_CREATED_AT, created_at_ms)
        start = end


def common_of(metadata: MessageMetadata) -> bytes:
    """The fields of a message but its ID and payload, encoded."""
    return Message(
        headers=metadata.headers,
        created_at_ms=metadata.created_at_ms,
        received_at_ms=metadata.received_at_ms,
        retention_s=metadata.retention_s,
    ).SerializeToString()
