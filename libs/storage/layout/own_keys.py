"""The keys of our own records, types 0x41 and up; keys.py says what all keys share."""

from collections.abc import Callable
from typing import NamedTuple

from libs.storage.layout.keys import (
    LAST_NUMBER,
    NUMBER,
    RecordType,
    bucket_keys,
    key_head,
    open_key,
    queue_keys,
    through,
)
from libs.storage.layout.primitives import Fixed, KeyRange, terminated

_IN_MINUTE = Fixed(order=">", minute="I", number="Q")
_SLOT = Fixed(order=">", slot="H")
_OUTBOX = Fixed(order=">", ingest_shard="Q", number="Q")
MINUTE_MS = 60_000
"""Keys have the minute since 1970 in which something happened, or ends."""
ULID_BYTES = 16
REQUEST_DIGEST_BYTES = 16

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
#   draining         | 01 | 5C |                                                          both
#   move             | 01 | 5D | <queue> |                                                broker
#   leaving          | 01 | 5E |                                                          both
#   task request     | 01 | 5F | digest of the request ID, 16 bytes |                     ingest

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
DRAINING_KEY = key_head(RecordType.DRAINING)
LEAVING_KEY = key_head(RecordType.LEAVING)


class RequestIdsKey(NamedTuple):
    """The key of a request IDs row: minutes since 1970, and the first sequence of its messages.

    A row that begins with a publish without a new message has a number above 2^63 in its place.
    """

    minute: int
    first_sequence: int


def _number_keys(
    record: str, record_type: RecordType, layout: Fixed = NUMBER, maximum: int = LAST_NUMBER
) -> tuple[Callable[[int], bytes], Callable[[bytes], int], Callable[..., KeyRange]]:
    """The builder, the parser and the range of keys that are one number.

    The range has the numbers from the first argument to the second, without arguments all.
    """
    head = key_head(record_type)

    def build(number: int) -> bytes:
        return head + layout.pack(number)

    def parse(key: bytes) -> int:
        return int(open_key(record, record_type, key).last("number", layout)[0])

    def key_range(first: int = 0, last: int = maximum) -> KeyRange:
        return through(build(first), build(last))

    return build, parse, key_range


def _pair_keys(
    record: str, record_type: RecordType, layout: Fixed
) -> tuple[
    Callable[[int, int], bytes], Callable[[bytes], tuple[int, int]], Callable[..., KeyRange]
]:
    """The builder, the parser and the range of keys that are two numbers.

    The range has all keys whose first number is from its first argument to its second.
    """
    head = key_head(record_type)

    def build(first: int, second: int) -> bytes:
        return head + layout.pack(first, second)

    def parse(key: bytes) -> tuple[int, int]:
        names = " and ".join(layout.names)
        first, second = open_key(record, record_type, key).last(names, layout)
        return int(first), int(second)

    def key_range(first: int = 0, last: int = LAST_NUMBER) -> KeyRange:
        return through(build(first, 0), build(last, LAST_NUMBER))

    return build, parse, key_range


routing_cursor_key, parse_routing_cursor_key, routing_cursor_range = _number_keys(
    "routing cursor key", RecordType.ROUTING_CURSOR
)
outbox_counter_key, parse_outbox_counter_key, outbox_counter_range = _number_keys(
    "outbox counter key", RecordType.OUTBOX_COUNTER
)
outbox_progress_key, parse_outbox_progress_key, outbox_progress_range = _number_keys(
    "outbox progress key", RecordType.OUTBOX_PROGRESS
)
redrive_key, parse_redrive_key, redrive_range = _number_keys("redrive key", RecordType.REDRIVE)
events_key, parse_events_key, events_range = _number_keys("events key", RecordType.EVENTS)
finished_leases_key, parse_finished_leases_key, finished_leases_range = _number_keys(
    "finished leases key", RecordType.FINISHED_LEASES, _SLOT, 0xFFFF
)

request_ids_key, _parse_request_ids, request_ids_range = _pair_keys(
    "request IDs key", RecordType.REQUEST_IDS, _IN_MINUTE
)
dedupe_ends_key, parse_dedupe_ends_key, dedupe_ends_range = _pair_keys(
    "dedupe ends key", RecordType.DEDUPE_END, _IN_MINUTE
)
executed_key, parse_executed_key, executed_range = _pair_keys(
    "executed key", RecordType.EXECUTED, _IN_MINUTE
)
outbox_key, parse_outbox_key = _pair_keys("outbox key", RecordType.OUTBOX, _OUTBOX)[:2]
refused_push_key, parse_refused_push_key, refused_push_range = _pair_keys(
    "refused push key", RecordType.REFUSED_PUSH, _OUTBOX
)

replay_key, parse_replay_key, replay_range = queue_keys("replay key", RecordType.REPLAY)
move_key, parse_move_key, move_range = queue_keys("move key", RecordType.MOVE)
delayed_key, parse_delayed_key, delayed_range = bucket_keys("delayed key", RecordType.DELAYED)
archived_key, parse_archived_key, archived_range = bucket_keys("archived key", RecordType.ARCHIVED)


def parse_request_ids_key(key: bytes) -> RequestIdsKey:
    return RequestIdsKey(*_parse_request_ids(key))


def dedupe_key(key: str) -> bytes:
    """ValueError when the dedupe key is empty."""
    if not key:
        raise ValueError("dedupe key is empty")
    return key_head(RecordType.DEDUPE_KEY) + terminated(key.encode())


def parse_dedupe_key(key: bytes) -> str:
    reader = open_key("dedupe key", RecordType.DEDUPE_KEY, key)
    raw = reader.terminated("dedupe key")
    reader.finish()
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise reader.corrupt(f"the dedupe key is not valid UTF-8: {error.reason}") from None


def outbox_range(ingest_shard: int, first_number: int, last_number: int = LAST_NUMBER) -> KeyRange:
    return through(outbox_key(ingest_shard, first_number), outbox_key(ingest_shard, last_number))


def _bytes_keys(
    record: str, record_type: RecordType, name: str, size: int
) -> tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]:
    """The builder, which raises ValueError for any other size, and the parser of keys of bytes."""
    head = key_head(record_type)

    def build(given: bytes) -> bytes:
        if len(given) != size:
            raise ValueError(f"a {name} has {size} bytes, not {len(given)}")
        return head + given

    def parse(key: bytes) -> bytes:
        reader = open_key(record, record_type, key)
        found = reader.take(name, size)
        reader.finish()
        return found

    return build, parse


task_key, parse_task_key = _bytes_keys("task key", RecordType.TASK, "ULID", ULID_BYTES)
task_request_key, parse_task_request_key = _bytes_keys(
    "task request key", RecordType.TASK_REQUEST, "digest", REQUEST_DIGEST_BYTES
)


def task_range(after: bytes) -> KeyRange:
    """All tasks, the oldest first, or those after the ULID `after`, unless it is empty."""
    head = key_head(RecordType.TASK)
    return KeyRange(task_key(after) + b"\x00" if after else head, head + ULID_BYTES * b"\xff")
