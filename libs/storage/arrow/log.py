"""The metadata log and the payload records as Arrow columns; layouts: metadata.py, payloads.py.

A log entry does not store where its records begin: each ends where its headers do. But all records
of an entry were received at the same time, which each has at the same offset. So one search finds
that time in all entries, each record that would begin there is measured, and an entry is accepted
only if its records follow each other without a gap, from its first byte to its trailing arrays. The
records of every other entry are found one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from libs.storage.arrow import columns
from libs.storage.arrow.columns import Column, Ints, Mask, Places, Walk
from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import MAX_MESSAGE_ID, SEQUENCE_BITS
from libs.storage.layout.primitives import Row
from libs.storage.records.metadata import RECORD_HEAD, decode_log_entry, record_spans
from libs.storage.records.payloads import decode_payload

_HEAD: Final = columns.row_type(RECORD_HEAD)
_RECEIVED: Final = 16
"""The offset of the time of receipt in a record."""

_RARE: Final = 4
"""The byte of that time to search for: the same for 49 days, and 0x80 or more until 2039, so that
ASCII text does not contain it."""

_I64: Final = np.dtype("<i8")
_NO_DELAY: Final = -1
_NEAR: Final = 65_535
"""The ID of a record is less than this above that of its entry's first record."""

LOG_SCHEMA: Final = pa.schema(
    [
        pa.field("message_id", pa.int64(), nullable=False),
        pa.field("ingest_shard", pa.int32(), nullable=False),
        pa.field("entry_sequence", pa.int64(), nullable=False),
        pa.field("created_at", columns.TIMESTAMP, nullable=False),
        pa.field("received_at", columns.TIMESTAMP, nullable=False),
        pa.field("visible_at", columns.TIMESTAMP),
        pa.field("retention_s", pa.int64(), nullable=False),
        pa.field("retention_deadline", columns.TIMESTAMP),
        pa.field("delay_ms", pa.int64()),
        pa.field("payload_bytes", pa.int64(), nullable=False),
        pa.field("direct_queue", pa.string()),
        pa.field("headers", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
    ]
)
"""A message of the log: times in UTC, null where there is none; `day` is that of its receipt."""

PAYLOAD_SCHEMA: Final = pa.schema(
    [
        pa.field("message_id", pa.int64(), nullable=False),
        pa.field("ingest_shard", pa.int32(), nullable=False),
        pa.field("payload", pa.binary()),
        pa.field("uri", pa.string()),
    ]
)
"""A payload, or the URI of the object that holds it."""


class _Found(NamedTuple):
    """The columns of a batch, and the places of its texts."""

    walk: Walk
    owner: Ints  # of each message, its entry
    heads: npt.NDArray[Any]
    keys: Places
    values: Places
    delays: npt.NDArray[Any]
    sizes: npt.NDArray[Any]
    queues: Places


def log_batches(rows: Sequence[Row], schema: pa.Schema = LOG_SCHEMA) -> list[pa.RecordBatch]:
    """The messages of log entries; CorruptRecord when one of the entries is damaged.

    Only the columns of `schema` are made.
    """
    found = _measure([value for _, value in rows], _records)
    odd = found.walk.odd
    if not odd.any():
        return [_batch(rows, found, schema)]
    some = [rows[index] for index in np.flatnonzero(odd).tolist()]
    exact = _measure([value for _, value in some], _exact_records)
    for index in np.flatnonzero(exact.walk.odd).tolist():
        decode_log_entry(some[index][1])  # says what is wrong
        raise CorruptRecord("log entry", f"a message ID is above {MAX_MESSAGE_ID:#x}")
    batches = [_batch(some, exact, schema)]
    usual = [rows[index] for index in np.flatnonzero(~odd).tolist()]
    if usual:
        found = _measure([value for _, value in usual], _records)
        batches.insert(0, _batch(usual, found, schema))
    return batches


def _measure(
    values: Sequence[bytes], records: Callable[[Walk, Ints, Sequence[bytes]], tuple[Ints, Ints]]
) -> _Found:
    walk = Walk(values)
    starts, owner = records(walk, walk.counts(), values)
    heads = columns.rows_at(walk.data, starts, _HEAD)
    at, keys, texts = _headers(walk, starts, owner, heads)
    # Each record must end where the next one begins, the last one where the trailing arrays begin.
    last = np.ones(len(starts), np.bool_)
    last[:-1] = owner[1:] != owner[:-1]
    walk.odd[owner[:-1][(at[:-1] != starts[1:]) & ~last[:-1]]] = True
    walk.at[owner[last]] = at[last]
    counts = np.bincount(owner, minlength=len(values))
    delays = walk.beside(counts, "<i8", _NO_DELAY)
    sizes = walk.beside(counts, "<u4")
    queues = walk.texts_beside(counts)
    walk.finish()
    walk.odd[owner[delays < _NO_DELAY]] = True
    walk.odd[owner[heads["message_id"].view(np.uint64) > MAX_MESSAGE_ID]] = True
    return _Found(walk, owner, heads, keys, texts, delays, sizes, queues)


def _exact_records(walk: Walk, counts: Ints, values: Sequence[bytes]) -> tuple[Ints, Ints]:
    """Like `_records`, entry by entry. Raises CorruptRecord."""
    starts: list[int] = []
    firsts = (walk.at - 2).tolist()
    for first, count, value in zip(firsts, counts.tolist(), values, strict=True):
        starts += [first + start for start, _ in record_spans(value, count)]
    return np.array(starts, np.int64), columns.owners(counts)


def _records(walk: Walk, counts: Ints, _: Sequence[bytes]) -> tuple[Ints, Ints]:
    """The starts of all records, and the entry of each; marks entries as odd."""
    data, first = walk.data, walk.at
    heads = columns.rows_at(data, first, _HEAD)
    marks = np.unique(heads["received_at_ms"] >> (8 * _RARE) & 0xFF)
    stream = np.frombuffer(data, np.uint8)
    found = [np.flatnonzero(stream == mark) - (_RECEIVED + _RARE) for mark in marks]
    starts = np.sort(np.concatenate(found)) if len(found) > 1 else found[0]
    cuts = np.searchsorted(starts, np.concatenate((first, walk.ends[-1:])))
    owner = columns.owners(np.diff(cuts))
    starts = starts[cuts[0] : cuts[-1]]
    times = columns.rows_at(data, starts + _RECEIVED, _I64)
    kept = times == heads["received_at_ms"][owner]
    starts, owner = starts[kept], owner[kept]
    ids = columns.rows_at(data, starts, _I64)
    kept = (ids - heads["message_id"][owner]).view(np.uint64) < _NEAR
    kept &= starts + _HEAD.itemsize <= walk.ends[owner]
    starts, owner = starts[kept], owner[kept]
    begins = np.searchsorted(owner, np.arange(len(counts)))
    walk.odd |= np.bincount(owner, minlength=len(counts)) != counts
    has_any = counts > 0
    walk.odd |= ~has_any
    firsts = starts[np.minimum(begins, len(starts) - 1)] if len(starts) else begins - 1
    walk.odd |= has_any & (firsts != first)
    kept = ~walk.odd[owner]
    return starts[kept], owner[kept]


def _headers(
    walk: Walk, starts: Ints, owner: Ints, heads: npt.NDArray[Any]
) -> tuple[Ints, Places, Places]:
    """The end of each record, and the places of its headers' keys and values."""
    counts = heads["header_count"].astype(np.int64)
    firsts = np.cumsum(counts) - counts
    ends = walk.ends[owner]
    at = starts + _HEAD.itemsize
    parts = [np.zeros(int(counts.sum()), np.int64) for _ in range(4)]
    for step in range(int(counts.max(initial=0))):
        now = np.flatnonzero(counts > step)
        places, here, limit = firsts[now] + step, at[now], ends[now]
        for begins, lengths in (parts[:2], parts[2:]):
            size = columns.rows_at(walk.data, here, columns.U16).astype(np.int64)
            begins[places], lengths[places] = here + 2, size
            here = np.minimum(here + 2 + size, limit + 1)
        at[now] = here
    walk.odd[owner[at > ends]] = True
    return at, (parts[0], parts[1]), (parts[2], parts[3])


def _batch(rows: Sequence[Row], found: _Found, schema: pa.Schema) -> pa.RecordBatch:
    heads, data, delays = found.heads, found.walk.data, found.delays
    message_ids, received_ms = heads["message_id"], heads["received_at_ms"]

    def headers() -> pa.Array:
        keys = columns.texts("log entry", data, found.keys)
        values = columns.texts("log entry", data, found.values)
        counts = np.cumsum(heads["header_count"], dtype="i8")
        offsets = np.concatenate((np.zeros(1, np.int64), counts))
        return pa.MapArray.from_arrays(pa.array(offsets.astype(np.int32)), keys, values)

    def queues() -> pa.Array:
        texts = columns.texts("log entry", data, found.queues)
        return columns.present(texts, found.queues[1])

    def deadlines() -> pa.Array:
        # A retention of 0 means for ever, and so does a deadline of 0.
        kept_s = heads["retention_s"].astype(np.int64)
        within = np.clip(received_ms, columns.FIRST_MS, columns.LAST_MS)
        return columns.times(np.where(kept_s > 0, within + 1000 * kept_s, 0), zero_is_none=True)

    made: dict[str, Column] = {
        "message_id": lambda: pa.array(message_ids.astype(np.int64)),
        "ingest_shard": lambda: shards(message_ids),
        "entry_sequence": lambda: pa.array(columns.last_numbers(rows)[found.owner]),
        "created_at": lambda: columns.times(heads["created_at_ms"]),
        "received_at": lambda: columns.times(received_ms),
        "visible_at": lambda: columns.times(heads["visible_at_ms"], zero_is_none=True),
        "retention_s": lambda: pa.array(heads["retention_s"].astype(np.int64)),
        "retention_deadline": deadlines,
        "delay_ms": lambda: pa.array(delays, mask=delays == _NO_DELAY),
        "payload_bytes": lambda: pa.array(found.sizes.astype(np.int64)),
        "direct_queue": queues,
        "headers": headers,
        "day": lambda: columns.days(received_ms),
    }
    return columns.batch(schema, made)


def shards(message_ids: Ints) -> pa.Array:
    """The ingest shards that assigned these IDs."""
    return pa.array((message_ids >> SEQUENCE_BITS).astype(np.int32))


# --- Payloads ---------------------------------------------------------------

_PAYLOAD_HEAD: Final = np.dtype([("kind", "u1"), ("size", "<u2")])
_INLINE, _URI = 1, 2


def payload_batch(rows: Sequence[Row], schema: pa.Schema = PAYLOAD_SCHEMA) -> pa.RecordBatch:
    """Payload records; CorruptRecord when one is damaged.

    Only the columns of `schema` are made; values are read only if one of them needs a value.
    """
    ids = columns.last_numbers(rows)
    made: dict[str, Column] = {
        "message_id": lambda: pa.array(ids),
        "ingest_shard": lambda: shards(ids),
    }
    if not made.keys() >= set(schema.names):
        made |= _contents(rows)
    return columns.batch(schema, made)


def _contents(rows: Sequence[Row]) -> dict[str, Column]:
    data, starts, ends = columns.join([value for _, value in rows])
    heads = columns.rows_at(data, starts, _PAYLOAD_HEAD)
    sizes = heads["size"].astype(np.int64)
    inline, uri = heads["kind"] == _INLINE, heads["kind"] == _URI
    whole = starts + _PAYLOAD_HEAD.itemsize + sizes == ends
    for odd in np.flatnonzero(~whole | ~(inline | uri)).tolist():
        decode_payload(rows[odd][1])  # says what is wrong
        raise CorruptRecord("payload value", "columns and exact decoder disagree")
    begins = starts + _PAYLOAD_HEAD.itemsize

    def column(wanted: Mask, kind: pa.DataType) -> Any:
        lengths = np.where(wanted, sizes, 0)
        if kind == pa.string():
            return columns.texts("payload value", data, (begins, lengths))
        return columns.pieces("payload value", data, (begins, lengths), kind)

    return {
        "payload": lambda: columns.where(inline, column(inline, pa.binary())),
        "uri": lambda: columns.where(uri, column(uri, pa.string())),
    }
