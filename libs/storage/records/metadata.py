"""The metadata of published messages: the RFC's record value, and the log entry that packs them.

    record     | message ID u64 | created at i64 | received at i64 | visible at i64 | retention u32
               | header count u8 | key Utf8 | value Utf8 | ... |
    log entry  | records: Array<record> | delay: Array<i64> | payload bytes: Array<u32>
               | direct queue: Array<Utf8>, left out where no message has one |

Little-endian; times in milliseconds since 1970, UTC. `visible at` 0: the producer set none.
Retention in seconds, 0: for ever. Delay in milliseconds, -1: none. Direct queue: the queue that a
message was pushed to, regardless of filters; empty: it was published. The arrays after the records
are ours: in the order of the records, and read as "no delay", 0 bytes and empty where missing.
"""

import struct
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, compress, repeat
from typing import Any, NamedTuple, TypeVar

from libs.storage.errors import CorruptRecord
from libs.storage.layout.primitives import (
    Fixed,
    Reader,
    count_prefix,
    number_array,
    utf8,
    utf8_array,
)
from libs.storage.records.log_runs import Fields, LogRun, encode_run, parted, run_length, stretches

# The header count is a u8.
MAX_HEADERS = 255

RECORD_HEAD = Fixed(
    message_id="Q",
    created_at_ms="q",
    received_at_ms="q",
    visible_at_ms="q",
    retention_s="I",
    header_count="B",
)
_MESSAGE_ID = struct.Struct("<Q")
_U16 = struct.Struct("<H")
_BEFORE_HEADERS = struct.Struct("<QqqqI")
NO_DELAY = -1
"""Stands for the delay of a message that has none of its own; 0 is one."""
_NONE: Mapping[int, int] = {}
_NO_QUEUE: Mapping[int, str] = {}

_T = TypeVar("_T")


class MessageMetadata(NamedTuple):
    """A message without its payload.

    Header keys and values are at most 65,535 bytes of UTF-8 each; their order is kept.
    The last three are in log entries only; a bare record has None, 0 and "".
    """

    message_id: int
    created_at_ms: int
    received_at_ms: int
    visible_at_ms: int
    retention_s: int
    headers: Mapping[str, str]
    delay_ms: int | None = None
    payload_bytes: int = 0
    direct_queue_id: str = ""


def encode_metadata_record(message: MessageMetadata) -> bytes:
    """One record, without delay and payload size; ValueError naming what does not fit."""
    headers = encode_headers(message.headers, keeps_order=True)
    return RECORD_HEAD.pack(*message[:5], headers[0]) + headers[1:]


def encode_log_entry(messages: Sequence[MessageMetadata]) -> bytes:
    """The log entry of these messages, 1 to 65,535; ValueError naming what does not fit."""
    delays = [_delay_number(message.delay_ms) for message in messages]
    sizes = [message.payload_bytes for message in messages]
    parts = [count_prefix("log entry", messages)]
    parts.extend(map(encode_metadata_record, messages))
    parts.append(number_array("delay_ms", "q", delays))
    parts.append(number_array("payload_bytes", "I", sizes))
    if any(message.direct_queue_id for message in messages):
        queues = [message.direct_queue_id for message in messages]
        parts.append(utf8_array("direct_queue_id", queues))
    return b"".join(parts)


def encode_headers(headers: Mapping[str, str], *, keeps_order: bool = False) -> bytes:
    """The end of a record, from its header count on; ValueError as for a record.

    Keys ascend, so that equal headers have equal bytes, unless it `keeps_order`.
    """
    if len(headers) > MAX_HEADERS:
        raise ValueError(f"headers: {len(headers)}, at most {MAX_HEADERS} fit")
    parts = [len(headers).to_bytes(1, "little")]
    pairs: Iterable[tuple[str, str]]
    pairs = headers.items() if keeps_order else sorted(headers.items())
    try:
        for key, value in pairs:
            raw_key, raw_value = key.encode(), value.encode()
            parts += (_U16.pack(len(raw_key)), raw_key, _U16.pack(len(raw_value)), raw_value)
    except (struct.error, UnicodeEncodeError):
        # Slowly, for the name of the header that does not fit.
        for key, value in pairs:
            parts += (utf8("header key", key), utf8(f"header {key[:64]!r}", value))
    return b"".join(parts)


def encode_log_columns(
    first_id: int,
    received_at_ms: int,
    created_at_ms: Sequence[int],
    retention_s: Sequence[int],
    headers: Sequence[bytes],
    payload_bytes: Sequence[int],
    visible_at_ms: Mapping[int, int] = _NONE,
    delay_ms: Mapping[int, int] = _NONE,
    direct_queue_id: Mapping[int, str] = _NO_QUEUE,
) -> bytes:
    """The log entry of messages with IDs in a row, from columns of equal length.

    The same bytes as `encode_log_entry`, without an object for each message: every publish calls
    this. `headers` are encoded already (`encode_headers`). The last three have values for few
    messages, by their places in the columns. ValueError naming what does not fit.
    """
    count = len(headers)
    if not len(created_at_ms) == len(retention_s) == count:
        raise ValueError(f"log entry {first_id}: columns of different lengths")
    parts = [count_prefix("log entry", headers)]
    pack = _BEFORE_HEADERS.pack
    visible_at = _spread(visible_at_ms, count, 0)
    columns: list[Sequence[Any]] = [headers, created_at_ms, visible_at, retention_s]
    try:
        for start, end, are_alike in stretches(columns):
            here = columns if end - start == count else [one[start:end] for one in columns]
            encoded, created, visible, retention = here
            ids = range(first_id + start, first_id + end)
            heads = map(pack, ids, created, repeat(received_at_ms), visible, retention)
            if are_alike:
                parts.append(encode_run(ids, next(heads)[8:] + encoded[0]))
            else:
                parts += chain.from_iterable(zip(heads, encoded, strict=True))
    except struct.error as error:
        raise ValueError(f"log entry {first_id}: a number does not fit: {error}") from None
    parts.append(number_array("delay_ms", "q", _spread(delay_ms, count, NO_DELAY)))
    parts.append(number_array("payload_bytes", "I", payload_bytes))
    if direct_queue_id:
        parts.append(utf8_array("direct_queue_id", _spread(direct_queue_id, count, "")))
    return b"".join(parts)


def _spread(values: Mapping[int, _T], count: int, default: _T) -> Sequence[_T]:
    """A column of `count` elements with these values at their places."""
    if not values:
        return (default,) * count
    column = [default] * count
    for at, value in values.items():
        column[at] = value
    return column


class Records(NamedTuple):
    """Consecutive records of a log entry.

    Attributes:
        records: Numbers and headers; consecutive equal headers share one dict.
        longer: The lengths of runs of several messages, by the places of their first records.
        messages_count: Of all records and runs.
        end: The offset after the last one.
    """

    records: list[tuple[Fields, dict[str, str]]]
    longer: dict[int, int]
    messages_count: int
    end: int


def read_records(data: bytes, at: int, messages_max: int, bytes_max: int) -> Records:
    """Up to `messages_max` records from offset `at` on, of those that begin within `bytes_max`."""
    records: list[tuple[Fields, dict[str, str]]] = []
    longer: dict[int, int] = {}
    left, next_id, end_max = messages_max, -1, at + bytes_max
    fields: Fields = (0, 0, 0, 0, 0)
    headers: dict[str, str] = {}
    known = b"\x00"  # the bytes of these headers, from their count on
    while left and at < end_max:
        start = at + _BEFORE_HEADERS.size
        if data.startswith(known, start):
            # Encoded headers contain their length, so this prefix is all of them.
            before, fields = fields, _BEFORE_HEADERS.unpack_from(data, at)
            end = start + len(known)
            if fields[0] == next_id and fields[1] == before[1] and fields[2:] == before[2:]:
                length = run_length(data, at, end, left)
                longer[len(records) - 1] = 1 + length
                at += length * (end - at)
                left -= length
                next_id = -1
                continue
        else:
            (fields, headers), end = _read_record(data, at)
            known = data[start:end]
        records.append((fields, headers))
        next_id = fields[0] + 1
        at = end
        left -= 1
    return Records(records, longer, messages_max - left, at)


def read_log_runs(data: bytes) -> Iterator[LogRun]:
    """The messages of a log entry; CorruptRecord when it is not one.

    Consecutive runs with equal headers share one dict: do not change it.
    """
    reader = Reader("log entry", data)
    count = reader.number("count of records", "H")
    read = read_records(data, 2, count, len(data))
    reader.take("records", read.end - 2)
    delays = reader.parallel_numbers("delay_ms", "q", count, default=NO_DELAY)
    sizes = reader.parallel_numbers("payload_bytes", "I", count)
    queues = reader.parallel_texts("direct_queue_id", count)
    reader.finish()
    if count and min(delays) < NO_DELAY:
        raise reader.corrupt(f"delay_ms = {min(delays)}")
    return runs_of(read, delays, sizes, queues)


def runs_of(
    read: Records, delays: Sequence[int], sizes: Sequence[int], queues: Sequence[str]
) -> Iterator[LogRun]:
    """The runs of records and their columns."""
    if read.longer:
        return parted(read.records, read.longer, delays, sizes, queues)
    fields_of = (record[0] for record in read.records)
    headers_of = (record[1] for record in read.records)
    return zip(fields_of, headers_of, delays, zip(sizes), queues, strict=True)


def decode_log_entry(data: bytes) -> list[MessageMetadata]:
    """The messages of a log entry, in order; CorruptRecord when it is not one."""
    make = partial(tuple.__new__, MessageMetadata)  # without a call of its own, for speed
    return [
        make((message_id, created, received, visible, retention, headers, delay, size, queue))
        for fields, headers, delay_ms, sizes, queue in read_log_runs(data)
        for first_id, created, received, visible, retention in (fields,)
        for delay in (None if delay_ms == NO_DELAY else delay_ms,)
        for message_id, size in enumerate(sizes, first_id)
    ]


def read_log_entry_head(data: bytes) -> tuple[int, int]:
    """The number of messages of a log entry, and when the first one was received, in ms."""
    count = Reader("log entry", data).number("count of records", "H")
    ((_, _, received_at_ms, *_), _), _ = _read_record(data, 2)
    return count, received_at_ms


class Removal(NamedTuple):
    """A log entry without some of its messages.

    Attributes:
        kept: The entry with the others, their bytes unchanged; None if there are none.
        removed: IDs and payload sizes of the removed ones.
        last_message_id: The last one of the entry before the removal.
    """

    kept: bytes | None
    removed: list[tuple[int, int]]
    last_message_id: int


def remove_messages(
    data: bytes, ids: Container[int], goes: Callable[[int, int, int], bool]
) -> Removal:
    """A log entry without those of these messages that `goes`; CorruptRecord when it is not one.

    `goes` is called with the ID, the time of receipt in ms and the retention in s of each.
    """
    reader = Reader("log entry", data)
    count = reader.number("count of records", "H")
    stays = bytearray(b"\x01") * count
    going: list[tuple[int, int]] = []
    records: list[bytes] = []
    message_id, end, kept_from = 0, 2, 2
    id_at = _MESSAGE_ID.unpack_from
    for place, (start, end) in enumerate(record_spans(data, count)):
        (message_id,) = id_at(data, start)
        if message_id not in ids:
            continue
        _, _, received_at_ms, _, retention_s = _BEFORE_HEADERS.unpack_from(data, start)
        if goes(message_id, received_at_ms, retention_s):
            going.append((place, message_id))
            stays[place] = 0
            records.append(data[kept_from:start])
            kept_from = end
    records.append(data[kept_from:end])
    reader.take("records", end - 2)
    delays = reader.parallel_numbers("delay_ms", "q", count, default=NO_DELAY)
    sizes = reader.parallel_numbers("payload_bytes", "I", count)
    queues = reader.parallel_texts("direct_queue_id", count)
    reader.finish()
    removed = [(gone, sizes[place]) for place, gone in going]
    kept = list(compress(sizes, stays))
    if not kept:
        return Removal(None, removed, message_id)
    parts = [count_prefix("log entry", kept), *records]
    parts.append(number_array("delay_ms", "q", list(compress(delays, stays))))
    parts.append(number_array("payload_bytes", "I", kept))
    direct = list(compress(queues, stays))
    if any(direct):
        parts.append(utf8_array("direct_queue_id", direct))
    return Removal(b"".join(parts), removed, message_id)


def last_message_id(data: bytes) -> int:
    """The ID of a log entry's last message; CorruptRecord when it is not one, or empty."""
    reader = Reader("log entry", data)
    count = reader.number("count of records", "H")
    if not count:
        raise reader.corrupt("no messages")
    ((start, _),) = deque(record_spans(data, count), maxlen=1)
    return int(_BEFORE_HEADERS.unpack_from(data, start)[0])


def record_spans(data: bytes, count: int) -> Iterator[tuple[int, int]]:
    """Where the `count` records of a log entry begin and end; CorruptRecord when it is not one."""
    end = 2
    known = b"\x00"  # the bytes of the last headers, from their count on
    read = {known}
    for _ in range(count):
        start = end
        headers = start + _BEFORE_HEADERS.size
        # Encoded headers contain their length, so this prefix is all of them.
        if data.startswith(known, headers):
            end = headers + len(known)
        else:
            end = _headers_end(data, headers)
            known = data[headers:end]
            if known not in read:
                _, end = _read_record(data, start)
                read.add(known)
        yield start, end


def _headers_end(data: bytes, at: int) -> int:
    """Where headers end by their lengths; beyond the data where they are damaged."""
    try:
        texts = 2 * data[at]
        at += 1
        for _ in range(texts):
            at += 2 + (data[at] | data[at + 1] << 8)
    except IndexError:
        return len(data) + 1
    return at


def _delay_number(delay_ms: int | None) -> int:
    if delay_ms is None:
        return NO_DELAY
    if delay_ms < 0:
        raise ValueError(f"delay_ms = {delay_ms} is negative")
    return delay_ms


def _read_record(data: bytes, at: int) -> tuple[tuple[Fields, dict[str, str]], int]:
    """The record at offset `at` and the offset after it.

    Written out rather than read field by field, as every router reads every message. A slice never
    fails, so one check at the end finds any that ran past the data.
    """
    try:
        *fields, header_count = RECORD_HEAD.unpack_from(data, at)
        at += RECORD_HEAD.size
        headers = {}
        for _ in range(header_count):
            start = at + 2
            at = start + _U16.unpack_from(data, at)[0]
            key = str(data[start:at], "utf-8")
            start = at + 2
            at = start + _U16.unpack_from(data, at)[0]
            headers[key] = str(data[start:at], "utf-8")
    except struct.error:
        raise CorruptRecord("log entry", f"ends within the record before byte {at}") from None
    except UnicodeDecodeError as error:
        detail = f"a header before byte {at} is not valid UTF-8: {error.reason}"
        raise CorruptRecord("log entry", detail) from None
    if at > len(data):
        raise CorruptRecord("log entry", f"ends within the record before byte {at}")
    if len(headers) != header_count:
        raise CorruptRecord("log entry", f"it has a header key twice before byte {at}")
    return (tuple(fields), headers), at
