"""The keys of the RFC's records, drawn beside the code that builds and parses them.

A key starts with `version u8 = 01 | type u8`; every number in a key is big-endian, so that bytes
sort like numbers. <queue> is the queue's ID in UTF-8 as TerminatedBytes, so the keys of two queues
never interleave. Builders raise ValueError for a number out of bounds, parsers CorruptRecord. A
range includes both of its ends; minutes are since 1970.
"""

from collections.abc import Callable, Collection
from enum import IntEnum
from typing import NamedTuple

from libs.storage.layout.buckets import (
    MAX_NUMBER,
    BucketKind,
    bucket_number,
    kind_of,
    lane_order,
    order_in_time,
    split_bucket,
)
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.layout.primitives import Fixed, KeyRange, Reader, terminated

KEY_VERSION = 1


class RecordType(IntEnum):
    """The second byte of a key: the RFC's own types, and ours from 0x40 up; see own_keys.py."""

    PAYLOAD = 0x01  # the metadata log's entries too: the two never meet, see LOG_KEY
    ACTIVE = 0x02
    DONE = 0x03
    FAILED = 0x04
    ATTEMPTS = 0x05
    CONFIG = 0x06
    QUEUE_STATE = 0x40
    ROUTING_CURSOR = 0x41
    ID_BLOCK = 0x42
    REQUEST_IDS = 0x43
    DEDUPE_KEY = 0x44
    OUTBOX = 0x45
    PURGE_EPOCH = 0x46
    OUTBOX_COUNTER = 0x47
    CLOCK = 0x48
    CONFIG_REVISION = 0x49
    FINISHED_LEASES = 0x4A
    DEDUPE_END = 0x4B
    DELAYED = 0x4C
    REPLAY = 0x4D
    REDRIVE = 0x4E
    EXECUTED = 0x4F
    OUTBOX_PROGRESS = 0x50
    REFUSED_PUSH = 0x51
    ARCHIVED = 0x52
    LOG_BOUNDS = 0x53
    PAYLOAD_PACK = 0x54
    LOG_GAPS = 0x55
    FORMAT = 0x56
    TASK = 0x57
    EVENT_CURSOR = 0x58
    FORGOTTEN_REVISION = 0x59
    EVENTS = 0x5A
    EVENT_COUNTER = 0x5B
    DRAINING = 0x5C
    MOVE = 0x5D
    LEAVING = 0x5E
    TASK_REQUEST = 0x5F


NUMBER = Fixed(order=">", number="Q")
_MESSAGE_ID = Fixed(order=">", message_id="Q")
BUCKET = Fixed(order=">", bucket="Q")
LAST_NUMBER = (1 << 64) - 1
BEHIND_NUMBERS = b"\xff"
"""Appended to a bucket number: sorts after all keys of timed buckets that have it."""


def key_head(record_type: RecordType) -> bytes:
    return bytes((KEY_VERSION, record_type))


def _read_type(reader: Reader) -> int:
    version, found = reader.take("version and type", 2)
    if version != KEY_VERSION:
        raise reader.corrupt(f"unknown version {version:02x}")
    return found


def open_key(record: str, record_type: RecordType, key: bytes) -> Reader:
    """A reader of the key, after its first two bytes; CorruptRecord for another type."""
    reader = Reader(record, key)
    found = _read_type(reader)
    if found != record_type:
        raise reader.corrupt(f"type {found:02x} instead of {record_type:02x}")
    return reader


def through(first: bytes, last: bytes) -> KeyRange:
    # The smallest key after `last` is `last` with a zero byte.
    return KeyRange(first, last + b"\x00")


# --- Ingest database: payloads and the metadata log -------------------------
#
#   payload    | 01 | 01 | message ID u64 |
#   log entry  | 01 | 01 | log key, TerminatedBytes | sequence u64 |
#
# The log key starts with "o" (6F), and the highest byte of a message ID is at most 3F, so all log
# entries sort after all payloads.

LOG_KEY = b"opendata-queue/messages/metadata"
assert LOG_KEY[0] > MAX_MESSAGE_ID >> 56, "payload keys would reach into the metadata log"

_PAYLOAD_HEAD = key_head(RecordType.PAYLOAD)


def payload_key(message_id: int) -> bytes:
    if not 0 <= message_id <= MAX_MESSAGE_ID:
        raise ValueError(f"message_id = {message_id} is not within 0..{MAX_MESSAGE_ID}")
    return _PAYLOAD_HEAD + message_id.to_bytes(8, "big")


def payload_keys(message_ids: Collection[int]) -> list[bytes]:
    for one in (min(message_ids, default=0), max(message_ids, default=0)):
        payload_key(one)  # checks the bounds of all
    return [_PAYLOAD_HEAD + one.to_bytes(8, "big") for one in message_ids]


def parse_payload_key(key: bytes) -> int:
    return _read_message_id(open_key("payload key", RecordType.PAYLOAD, key))


def payload_range(first_id: int = 0, last_id: int = MAX_MESSAGE_ID) -> KeyRange:
    return through(payload_key(first_id), payload_key(last_id))


_LOG_HEAD = _PAYLOAD_HEAD + terminated(LOG_KEY)


def log_key(sequence: int) -> bytes:
    """Key of the log entry whose first message has the ID `sequence`."""
    return _LOG_HEAD + NUMBER.pack(sequence)


def parse_log_key(key: bytes) -> int:
    if len(key) == len(_LOG_HEAD) + NUMBER.size and key.startswith(_LOG_HEAD):
        return int.from_bytes(key[len(_LOG_HEAD) :], "big")
    reader = open_key("log key", RecordType.PAYLOAD, key)  # says what is wrong
    if terminated(reader.terminated("log key")) != _LOG_HEAD[2:]:
        raise reader.corrupt("another log")
    return int(reader.last("sequence", NUMBER)[0])


def log_range(first_sequence: int, last_sequence: int = LAST_NUMBER) -> KeyRange:
    return through(log_key(first_sequence), log_key(last_sequence))


# --- Broker database: the lists of a queue ----------------------------------
#
#   active     | 01 | 02 | <queue> | bucket u64 |          timed buckets: and number u64
#   done       | 01 | 03 | <queue> | bucket u64 |
#   failed     | 01 | 04 | <queue> | bucket u64 |
#
# The bucket number is drawn in buckets.py.


class BucketKey(NamedTuple):
    """The key of an active, done or failed record; `number` is 0 unless the bucket is timed."""

    queue: str
    bucket: int
    number: int = 0


def queue_head(record_type: RecordType, queue: str) -> bytes:
    if not queue:
        raise ValueError("queue is empty")
    return key_head(record_type) + terminated(queue.encode())


def read_queue(reader: Reader) -> str:
    """The next part of a key, a queue."""
    try:
        queue = reader.terminated("queue").decode()
    except UnicodeDecodeError as error:
        raise reader.corrupt(f"queue is not valid UTF-8: {error.reason}") from None
    if not queue:
        raise reader.corrupt("queue is empty")
    return queue


def _read_message_id(reader: Reader) -> int:
    (message_id,) = reader.last("message ID", _MESSAGE_ID)
    if message_id > MAX_MESSAGE_ID:
        raise reader.corrupt(f"{message_id:#x} is not a message ID")
    return int(message_id)


def queue_keys(
    record: str, record_type: RecordType
) -> tuple[Callable[[str], bytes], Callable[[bytes], str], Callable[..., KeyRange]]:
    """The builder, the parser and the range of keys that are a queue.

    The range has all queues, or those after the one that it is given.
    """

    def build(queue: str) -> bytes:
        return queue_head(record_type, queue)

    def parse(key: bytes) -> str:
        reader = open_key(record, record_type, key)
        queue = read_queue(reader)
        reader.finish()
        return queue

    def key_range(after: str | None = None) -> KeyRange:
        head = key_head(record_type)
        start = head if after is None else build(after) + b"\x00"
        return KeyRange(start, head + b"\xff")

    return build, parse, key_range


def bucket_keys(
    record: str, record_type: RecordType
) -> tuple[
    Callable[[str, int], bytes], Callable[[bytes], BucketKey], Callable[[str, int, int], KeyRange]
]:
    """The builder, the parser and the range of keys that are a queue and a bucket."""

    def build(queue: str, bucket: int) -> bytes:
        return queue_head(record_type, queue) + BUCKET.pack(bucket)

    def parse(key: bytes) -> BucketKey:
        reader = open_key(record, record_type, key)
        queue = read_queue(reader)
        return BucketKey(queue, *reader.last("bucket", BUCKET))

    def key_range(queue: str, first_bucket: int, last_bucket: int) -> KeyRange:
        return through(build(queue, first_bucket), build(queue, last_bucket))

    return build, parse, key_range


def active_key(queue: str, bucket: int) -> bytes:
    return queue_head(RecordType.ACTIVE, queue) + BUCKET.pack(bucket)


def parse_active_key(key: bytes) -> BucketKey:
    reader = open_key("active key", RecordType.ACTIVE, key)
    queue = read_queue(reader)
    (bucket,) = reader.fixed("bucket", BUCKET)
    number = reader.fixed("number", NUMBER)[0] if kind_of(bucket) == BucketKind.TIMED else 0
    reader.finish()
    return BucketKey(queue, bucket, number)


def waiting_tail(priority: int, kind: BucketKind, lane_order: int) -> bytes:
    """The part of the key of available messages that follows the queue."""
    bucket = BUCKET.pack(bucket_number(priority, kind, order_in_time(kind, lane_order)))
    return bucket + NUMBER.pack(lane_order & MAX_NUMBER) if kind == BucketKind.TIMED else bucket


def waiting_key(queue: str, priority: int, kind: BucketKind, lane_order: int) -> bytes:
    return queue_head(RecordType.ACTIVE, queue) + waiting_tail(priority, kind, lane_order)


def waiting_range(
    queue: str, priority: int, kind: BucketKind, first_order: int, last_order: int
) -> KeyRange:
    return through(
        waiting_key(queue, priority, kind, first_order),
        waiting_key(queue, priority, kind, last_order),
    )


def parse_waiting_key(key: bytes) -> int:
    """The lane order in the key of a bucket of available messages."""
    found = parse_active_key(key)
    _, kind, order = split_bucket(found.bucket)
    return lane_order(kind, order, found.number)


def active_range(queue: str, first_bucket: int, last_bucket: int) -> KeyRange:
    """The active buckets from `first_bucket` to `last_bucket`, both included.

    Up to `bucket_number(p, k, last_order(epoch))`: all others of that priority, kind and epoch.
    """
    end = active_key(queue, last_bucket) + BEHIND_NUMBERS
    return KeyRange(active_key(queue, first_bucket), end)


done_key, parse_done_key, done_range = bucket_keys("done key", RecordType.DONE)
failed_key, parse_failed_key, failed_range = bucket_keys("failed key", RecordType.FAILED)


# --- Broker database: one record per queue, or per message in a queue -------
#
#   attempts     | 01 | 05 | <queue> | message ID u64 |
#   config       | 01 | 06 | <queue> |
#   queue state  | 01 | 40 | <queue> |


def attempts_key(queue: str, message_id: int) -> bytes:
    return queue_head(RecordType.ATTEMPTS, queue) + _MESSAGE_ID.pack(message_id)


def attempts_range(queue: str, first_id: int, last_id: int) -> KeyRange:
    return through(attempts_key(queue, first_id), attempts_key(queue, last_id))


config_key, parse_config_key, config_range = queue_keys("config key", RecordType.CONFIG)
queue_state_key, parse_queue_state_key, queue_state_range = queue_keys(
    "queue state key", RecordType.QUEUE_STATE
)
