"""Messages in runs, encoded for BatchGetMessages: neighbours differ in little but their payloads.

What the messages of a run have in common is a `Message` of message.proto in protobuf's wire format.
No object is made per message (docs/decisions/0015-messages-as-bytes.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from operator import ne
from typing import Final, NamedTuple, TypeVar

from libs.serving.protobytes import framed, packed_varints, tag_of, varint
from services.ingest.batches import NOT_SET
from services.ingest.read.answer_room import Metadata
from services.ingest.read.payload_cache import Run
from slatemq.v1.ingest_pb2 import BatchGetMessagesResponse, StoredRun
from slatemq.v1.message_pb2 import Message

__all__ = ["MessageRun", "ReadResult", "common_of", "common_stretches", "select"]

T = TypeVar("T")

_RUNS: Final = tag_of(BatchGetMessagesResponse, "runs")
_COMMON: Final = tag_of(StoredRun, "common")
_MESSAGE_IDS: Final = tag_of(StoredRun, "message_ids")
_PAYLOADS: Final = tag_of(StoredRun, "payloads")
_ETAGS: Final = tag_of(StoredRun, "etags")
_HEADERS: Final = tag_of(Message, "headers")
_KEY: Final = tag_of(Message.HeadersEntry, "key")
_VALUE: Final = tag_of(Message.HeadersEntry, "value")
_CREATED_AT: Final = tag_of(Message, "created_at_ms")
_RECEIVED_AT: Final = tag_of(Message, "received_at_ms")
_RETENTION: Final = tag_of(Message, "retention_s")


class MessageRun(NamedTuple):
    """Messages in a row that have all but their IDs, payloads and etags in common."""

    common: bytes
    message_ids: list[int]
    payloads: list[bytes]
    etags: list[str]

    def fields(self) -> list[bytes]:
        """One of the `runs` of a response, encoded, in pieces."""
        sizes = list(map(len, self.payloads))
        head = _PAYLOADS + varint(sizes[0])
        pieces = [head, b""] * len(sizes)
        if sizes.count(sizes[0]) < len(sizes):
            heads = {size: _PAYLOADS + varint(size) for size in set(sizes)}
            pieces[0::2] = map(heads.__getitem__, sizes)
        pieces[1::2] = self.payloads
        before = framed(_COMMON, self.common)
        before += framed(_MESSAGE_IDS, packed_varints(self.message_ids))
        before += b"".join(framed(_ETAGS, etag.encode()) for etag in self.etags)
        size = len(before) + sum(map(len, pieces))
        return [_RUNS + varint(size) + before, *pieces]


class ReadResult(NamedTuple):
    """Messages read, in the order asked for, and the IDs of those that are not stored.

    `damaged_ids` are among `missing_ids`. The payloads of slow ones are still being read: they are
    neither in a run nor missing.
    """

    runs: list[MessageRun]
    missing_ids: list[int]
    damaged_ids: list[int]
    slow_ids: list[int]

    def add(
        self, common: bytes, message_ids: list[int], payloads: list[bytes], etags: Sequence[str]
    ) -> None:
        """Append messages with this in common, to the last run where they fit it."""
        if not self.runs or self.runs[-1].common != common:
            self.runs.append(MessageRun(common, [], [], []))
        run = self.runs[-1]
        run.message_ids.extend(message_ids)
        run.payloads.extend(payloads)
        run.etags.extend(etags)

    def encode(self) -> bytes:
        """A BatchGetMessagesResponse in protobuf's wire format."""
        response = BatchGetMessagesResponse(
            missing_ids=self.missing_ids, damaged_ids=self.damaged_ids, slow_ids=self.slow_ids
        )
        fields = [piece for run in self.runs for piece in run.fields()]
        return b"".join([*fields, response.SerializeToString()])


def select(column: Sequence[T], offsets: Sequence[int]) -> Sequence[T]:
    """The items at these offsets."""
    if isinstance(offsets, range):
        return column[offsets.start : offsets.stop]
    return list(map(column.__getitem__, offsets))


def common_stretches(run: Run, offsets: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Split messages of a cached run where their common fields change.

    Yields the end of each stretch, counted in `offsets`, and the common fields of its messages.
    """
    columns, count = run.columns, len(offsets)
    headers = select(columns.header_bytes, offsets)
    times = select(columns.created_at_ms, offsets)
    retentions = select(columns.retention_s, offsets)
    ends = [count]
    if any(column.count(column[0]) < count for column in (headers, times, retentions)):
        rows = list(zip(headers, times, retentions, strict=True))
        ends = [*compress(range(1, count), map(ne, rows, rows[1:])), count]
    start, before, behind = 0, b"", b""
    known: tuple[bytes, int] | None = None
    for end in ends:
        # Where each message has a time of its own, the rest is the same for most.
        if known != (headers[start], retentions[start]):
            known = (headers[start], retentions[start])
            before = _headers(columns.headers[offsets[start]])
            behind = _receipt(run.received_at_ms, retentions[start])
        created_at_ms = run.received_at_ms if times[start] == NOT_SET else times[start]
        yield end, before + _number(_CREATED_AT, created_at_ms) + behind
        start = end


def common_of(metadata: Metadata) -> bytes:
    """The fields of a message but its ID and payload, encoded."""
    return (
        _headers(metadata.headers)
        + _number(_CREATED_AT, metadata.created_at_ms)
        + _receipt(metadata.received_at_ms, metadata.retention_s)
    )


def _headers(headers: Mapping[str, str]) -> bytes:
    return b"".join(
        framed(_HEADERS, framed(_KEY, key.encode()) + framed(_VALUE, value.encode()))
        for key, value in headers.items()
    )


def _receipt(received_at_ms: int, retention_s: int) -> bytes:
    return _number(_RECEIVED_AT, received_at_ms) + _number(_RETENTION, retention_s)


def _number(tag: bytes, number: int) -> bytes:
    """An integer field; nothing for 0, as in proto3."""
    return tag + varint(number) if number else b""
