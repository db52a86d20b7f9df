"""The keys of our own records, types 0x41 and up; keys.py says what all keys share."""

from typing import NamedTuple

from libs.storage.layout.keys import (
    LAST_NUMBER,
    NUMBER,
    BucketKey,
    RecordType,
    key_head,
    open_key,
    parse_queue_bucket_key,
    parse_queue_key,
    queue_bucket_key,
    queue_head,
    queue_range,
    through,
)
from libs.storage.layout.primitives import Fixed, KeyRange, terminated

_IN_MINUTE = Fixed(order=">", minute="I", number="Q")
_SLOT = Fixed(order=">", slot="H")
_OUTBOX = Fixed(order=">", ingest_shard="Q", number="Q")
ULID_BYTES = 16

# --- Either database: single records and small series -----------------------
#
#   routing cursor   | 01 | 41 | log shard u64 |                                          broker
#   ID block         | 01 | 42 |                                                          ingest
#   request IDs      | 01 | 43 | minute u32 | first sequence of the commit u64 |          ingest
#   purge epoch      | 01 | 46 |                                                          ingest
#   clock            | 01 | 48 |                                                          both
#   config revision  | 01 | 49 |                                                          broker
#   finished leases  | 01 | 4A | slot u16 |                                               broker
#   dedupe key       | 01 | 44 | dedupe key, TerminatedBytes |                            ingest
#   dedupe ends      | 01 | 4B | minute u32 | first sequence of the commit u64 |          ingest
#   outbox           | 01 | 45 | ingest shard u64 | number u64 |                          broker
#   outbox counter   | 01 | 47 | ingest shard u64 |                                       broker
#   outbox progress  | 01 | 50 | broker shard u64 |                                       ingest
#   refused push     | 01 | 51 | ingest shard u64 | number u64 |                          broker
#   archived         | 01 | 52 | <queue> | bucket u64 |                                   broker
#   delayed          | 01 | 4C | <queue> | bucket u64 |                                   broker
#   replay           | 01 | 4D | <queue> |                                                broker
#   redrive          | 01 | 4E | number u64 |                                             broker
#   executed         | 01 | 4F | minute u32 | number u64 |                                broker
#   log bounds       | 01 | 53 |                                                          ingest
#   payload pack     | 01 | 54 | ID of its first message u64 |   see payload_packs.py       ingest
#   log gaps         | 01 | 55 |                                                          ingest
#   format           | 01 | 56 |                                                          both
#   task             | 01 | 57 | task, 16 bytes |                                         ingest
#   event cursor     | 01 | 58 |                                                          ingest
#   forgotten rev.   | 01 | 59 |                                                          broker
#   events           | 01 | 5A | number of the first event u64 |                          both
#   event counter    | 01 | 5B |                                                          both

ID_BLOCK_KEY = key_head(RecordType.ID_BLOCK)
PURGE_EPOCH_KEY = key_head(RecordType.PURGE_EPOCH)
CLOCK_KEY = key_head(RecordType.CLOCK)
CONFIG_REVISION_KEY = key_head(RecordType.CONFIG_REVISION)
LOG_BOUNDS_KEY = key_head(RecordType.LOG_BOUNDS)
LOG_GAPS_KEY = key_head(RecordType.LOG_GAPS)
FORMAT_KEY = key_head(RecordType.FORMAT)
EVENT_CURSOR_KEY = key_head(RecordType.EVENT_CURSOR)
FORGOTTEN_REVISION_KEY = key_head(RecordType.FORGOTTEN_REVISION)
EVENT_COUNTER_KEY = key_head(RecordType.EVENT_COUNTER)


class RequestIdsKey(NamedTuple):
    """The key of a request IDs row: minutes since 1970, and the commit's first sequence."""

    minute: int
    first_sequence: int


def routing_cursor_key(log_shard: int) -> bytes:
    return key_head(RecordType.ROUTING_CURSOR) + NUMBER.pack(log_shard)


def parse_routing_cursor_key(key: bytes) -> int:
    return _read_number("routing cursor key", RecordType.ROUTING_CURSOR, key)


def routing_cursor_range() -> KeyRange:
    return through(routing_cursor_key(0), routing_cursor_key(LAST_NUMBER))


def request_ids_key(minute: int, first_sequence: int) -> bytes:
    return key_head(RecordType.REQUEST_IDS) + _IN_MINUTE.pack(minute, first_sequence)


def parse_request_ids_key(key: bytes) -> RequestIdsKey:
    return RequestIdsKey(*_read_pair("request IDs key", RecordType.REQUEST_IDS, _IN_MINUTE, key))


def request_ids_range(first_minute: int, last_minute: int) -> KeyRange:
    return through(request_ids_key(first_minute, 0), request_ids_key(last_minute, LAST_NUMBER))


def finished_leases_key(slot: int) -> bytes:
    return key_head(RecordType.FINISHED_LEASES) + _SLOT.pack(slot)


def finished_leases_range() -> KeyRange:
    return through(finished_leases_key(0), finished_leases_key(0xFFFF))


def dedupe_key(key: str) -> bytes:
    """ValueError when the dedupe key is empty."""
    if not key:
        raise ValueError("dedupe key is empty")
    return key_head(RecordType.DEDUPE_KEY) + terminated(key.encode())


def dedupe_ends_key(minute: int, first_sequence: int) -> bytes:
    return key_head(RecordType.DEDUPE_END) + _IN_MINUTE.pack(minute, first_sequence)


def dedupe_ends_range(first_minute: int, last_minute: int) -> KeyRange:
    return through(dedupe_ends_key(first_minute, 0), dedupe_ends_key(last_minute, LAST_NUMBER))


def outbox_key(ingest_shard: int, number: int) -> bytes:
    return key_head(RecordType.OUTBOX) + _OUTBOX.pack(ingest_shard, number)


def parse_outbox_key(key: bytes) -> tuple[int, int]:
    return _read_pair("outbox key", RecordType.OUTBOX, _OUTBOX, key)


def outbox_range(ingest_shard: int, first_number: int, last_number: int = LAST_NUMBER) -> KeyRange:
    return through(outbox_key(ingest_shard, first_number), outbox_key(ingest_shard, last_number))


def outbox_counter_key(ingest_shard: int) -> bytes:
    return key_head(RecordType.OUTBOX_COUNTER) + NUMBER.pack(ingest_shard)


def parse_outbox_counter_key(key: bytes) -> int:
    return _read_number("outbox counter key", RecordType.OUTBOX_COUNTER, key)


def outbox_counter_range() -> KeyRange:
    return through(outbox_counter_key(0), outbox_counter_key(LAST_NUMBER))


def refused_push_key(ingest_shard: int, number: int) -> bytes:
    return key_head(RecordType.REFUSED_PUSH) + _OUTBOX.pack(ingest_shard, number)


def parse_refused_push_key(key: bytes) -> tuple[int, int]:
    return _read_pair("refused push key", RecordType.REFUSED_PUSH, _OUTBOX, key)


def refused_push_range() -> KeyRange:
    return through(refused_push_key(0, 0), refused_push_key(LAST_NUMBER, LAST_NUMBER))


def outbox_progress_key(broker_shard: int) -> bytes:
    return key_head(RecordType.OUTBOX_PROGRESS) + NUMBER.pack(broker_shard)


def parse_outbox_progress_key(key: bytes) -> int:
    return _read_number("outbox progress key", RecordType.OUTBOX_PROGRESS, key)


def outbox_progress_range() -> KeyRange:
    return through(outbox_progress_key(0), outbox_progress_key(LAST_NUMBER))


def task_key(ulid: bytes) -> bytes:
    """ValueError unless the ULID has 16 bytes."""
    if len(ulid) != ULID_BYTES:
        raise ValueError(f"a ULID has {ULID_BYTES} bytes, not {len(ulid)}")
    return key_head(RecordType.TASK) + ulid


def parse_task_key(key: bytes) -> bytes:
    reader = open_key("task key", RecordType.TASK, key)
    ulid = reader.take("ULID", ULID_BYTES)
    reader.finish()
    return ulid


def task_range(after: bytes = b"") -> KeyRange:
    """All tasks, the oldest first, or those after the ULID `after`."""
    head = key_head(RecordType.TASK)
    return KeyRange(task_key(after) + b"\x00" if after else head, head + ULID_BYTES * b"\xff")


def events_key(first_number: int) -> bytes:
    return key_head(RecordType.EVENTS) + NUMBER.pack(first_number)


def parse_events_key(key: bytes) -> int:
    return _read_number("events key", RecordType.EVENTS, key)


def events_range(first_number: int, last_number: int = LAST_NUMBER) -> KeyRange:
    return through(events_key(first_number), events_key(last_number))


def delayed_key(queue: str, order: int) -> bytes:
    return queue_bucket_key(RecordType.DELAYED, queue, order)


def parse_delayed_key(key: bytes) -> BucketKey:
    return parse_queue_bucket_key("delayed key", RecordType.DELAYED, key)


def delayed_range(queue: str, first_order: int, last_order: int = LAST_NUMBER) -> KeyRange:
    return through(delayed_key(queue, first_order), delayed_key(queue, last_order))


def archived_key(queue: str, bucket: int) -> bytes:
    return queue_bucket_key(RecordType.ARCHIVED, queue, bucket)


def parse_archived_key(key: bytes) -> BucketKey:
    return parse_queue_bucket_key("archived key", RecordType.ARCHIVED, key)


def archived_range(queue: str, first_bucket: int, last_bucket: int) -> KeyRange:
    return through(archived_key(queue, first_bucket), archived_key(queue, last_bucket))


def replay_key(queue: str) -> bytes:
    return queue_head(RecordType.REPLAY, queue)


def parse_replay_key(key: bytes) -> str:
    return parse_queue_key("replay key", RecordType.REPLAY, key)


def replay_range() -> KeyRange:
    return queue_range(RecordType.REPLAY, None)


def redrive_key(number: int) -> bytes:
    return key_head(RecordType.REDRIVE) + NUMBER.pack(number)


def parse_redrive_key(key: bytes) -> int:
    return _read_number("redrive key", RecordType.REDRIVE, key)


def redrive_range() -> KeyRange:
    return through(redrive_key(0), redrive_key(LAST_NUMBER))


def executed_key(minute: int, number: int) -> bytes:
    return key_head(RecordType.EXECUTED) + _IN_MINUTE.pack(minute, number)


def parse_executed_key(key: bytes) -> tuple[int, int]:
    return _read_pair("executed key", RecordType.EXECUTED, _IN_MINUTE, key)


def executed_range(first_minute: int, last_minute: int) -> KeyRange:
    return through(executed_key(first_minute, 0), executed_key(last_minute, LAST_NUMBER))


def _read_number(record: str, record_type: RecordType, key: bytes) -> int:
    return int(open_key(record, record_type, key).last("number", NUMBER)[0])


def _read_pair(record: str, record_type: RecordType, layout: Fixed, key: bytes) -> tuple[int, int]:
    first, second = open_key(record, record_type, key).last(" and ".join(layout.names), layout)
    return int(first), int(second)
