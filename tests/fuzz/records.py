"""What databases give back: keys and values, log entries, packs, lists as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from libs.storage.arrow.queues import QueueShard, active_batches, done_batch, failed_batch
from libs.storage.errors import CorruptRecord
from libs.storage.layout.ids import encode_seq_block
from libs.storage.layout.keys import RecordType, active_key, done_key, failed_key
from libs.storage.records.archived_records import encode_archived
from libs.storage.records.catalogue import KINDS, kind_of_key
from libs.storage.records.configs import encode_config
from libs.storage.records.dedupe_records import encode_dedupe, encode_dedupe_ends
from libs.storage.records.delayed_records import encode_delayed
from libs.storage.records.event_records import (
    encode_event_counter,
    encode_event_cursor,
    encode_events,
)
from libs.storage.records.execution_records import (
    encode_executed,
    encode_outbox,
    encode_outbox_counter,
    encode_refused_push,
)
from libs.storage.records.log_bounds import encode_log_bounds, encode_log_gaps
from libs.storage.records.log_parts import read_log_parts
from libs.storage.records.log_runs import LogRun, one_by_one
from libs.storage.records.metadata import (
    NO_DELAY,
    MessageMetadata,
    decode_log_entry,
    encode_log_entry,
    last_message_id,
    read_log_entry_head,
    remove_messages,
)
from libs.storage.records.move_records import encode_move
from libs.storage.records.payload_packs import decode_pack, encode_pack, rest_of_pack
from libs.storage.records.payloads import PayloadUri, encode_inline, encode_uri
from libs.storage.records.queues import (
    decode_active,
    decode_done,
    decode_done_heads,
    decode_failed,
    encode_active,
    encode_attempts,
    encode_done,
    encode_failed,
)
from libs.storage.records.redrive_records import encode_redrive
from libs.storage.records.replay_records import encode_replay
from libs.storage.records.states import (
    encode_clock,
    encode_config_revision,
    encode_draining,
    encode_finished_leases,
    encode_forgotten_revision,
    encode_format,
    encode_leaving,
    encode_outbox_progress,
    encode_purge_epoch,
    encode_queue_state,
    encode_request_ids,
    encode_routing_cursor,
)
from libs.storage.records.task_records import encode_task_record, encode_task_request
from services.broker.core.settings import QueueSettings
from tests.fuzz.compare import refused, same

_TYPES: Final = sorted(KINDS)

_Encoder = Callable[[Any], bytes]

ENCODERS: Final[Mapping[RecordType, _Encoder]] = {
    RecordType.PAYLOAD: lambda value: (
        encode_uri(value.uri) if isinstance(value, PayloadUri) else encode_inline(value)
    ),
    RecordType.ACTIVE: lambda value: encode_active(*value),
    RecordType.DONE: encode_done,
    RecordType.FAILED: encode_failed,
    RecordType.ATTEMPTS: encode_attempts,
    RecordType.CONFIG: encode_config,
    RecordType.QUEUE_STATE: encode_queue_state,
    RecordType.ROUTING_CURSOR: encode_routing_cursor,
    RecordType.ID_BLOCK: encode_seq_block,
    RecordType.REQUEST_IDS: encode_request_ids,
    RecordType.DEDUPE_KEY: encode_dedupe,
    RecordType.OUTBOX: encode_outbox,
    RecordType.PURGE_EPOCH: encode_purge_epoch,
    RecordType.OUTBOX_COUNTER: encode_outbox_counter,
    RecordType.CLOCK: encode_clock,
    RecordType.CONFIG_REVISION: encode_config_revision,
    RecordType.FINISHED_LEASES: encode_finished_leases,
    RecordType.DEDUPE_END: encode_dedupe_ends,
    RecordType.DELAYED: encode_delayed,
    RecordType.REPLAY: encode_replay,
    RecordType.REDRIVE: encode_redrive,
    RecordType.EXECUTED: encode_executed,
    RecordType.OUTBOX_PROGRESS: encode_outbox_progress,
    RecordType.REFUSED_PUSH: encode_refused_push,
    RecordType.ARCHIVED: encode_archived,
    RecordType.LOG_BOUNDS: encode_log_bounds,
    RecordType.PAYLOAD_PACK: lambda value: encode_pack(_listed(0, value)),
    RecordType.LOG_GAPS: encode_log_gaps,
    RecordType.FORMAT: encode_format,
    RecordType.TASK: encode_task_record,
    RecordType.EVENT_CURSOR: encode_event_cursor,
    RecordType.FORGOTTEN_REVISION: encode_forgotten_revision,
    RecordType.EVENTS: encode_events,
    RecordType.EVENT_COUNTER: encode_event_counter,
    RecordType.DRAINING: encode_draining,
    RecordType.MOVE: encode_move,
    RecordType.LEAVING: encode_leaving,
    RecordType.TASK_REQUEST: encode_task_request,
}

_OF_RFC: Final = "the RFC's layout, which is read too, ends before the columns that are ours"

SEVERAL_FORMS: Final[Mapping[RecordType, str]] = {
    RecordType.ACTIVE: _OF_RFC,
    RecordType.DONE: _OF_RFC,
    RecordType.FAILED: _OF_RFC,
    RecordType.ATTEMPTS: _OF_RFC,
    RecordType.CONFIG: _OF_RFC,
    RecordType.ARCHIVED: "its list of runs has any order: columns of Spark would have to check it",
    RecordType.PAYLOAD_PACK: "it may be compressed, and end with places that have no payload",
}
"""The kinds of which one value has several forms, and why they are not refused."""


def record(data: bytes) -> None:
    """A value of the kind that the first byte chooses; what decodes, encodes to the same bytes."""
    if not data:
        return
    record_type = _TYPES[data[0] % len(_TYPES)]
    kind, encode = KINDS[record_type], ENCODERS[record_type]
    value = kind.decode(data[1:])
    if record_type == RecordType.CONFIG:
        QueueSettings.from_record(value)
    encoded = encode(value)
    if record_type not in SEVERAL_FORMS:
        same(encoded, data[1:], kind.name)
        return
    again = kind.decode(encoded)
    same(again, value, kind.name)
    same(encode(again), encoded, f"{kind.name}, encoded again")


def key(data: bytes) -> None:
    """A key of any kind."""
    kind_of_key(data).parse_key(data)


def log_entry(data: bytes) -> None:
    """A log entry, read in all ways; the first byte says how small the parts of a router are."""
    parts_max, entry = (data[0] % 8 + 1, data[1:]) if data else (1, b"")
    try:
        messages = decode_log_entry(entry)
    except CorruptRecord:
        refused(
            lambda: _of_parts(entry, parts_max), CorruptRecord, "parts of what is not a log entry"
        )
        raise
    same(_of_parts(entry, parts_max), messages, "parts")
    encoded = encode_log_entry(messages)
    same(decode_log_entry(encoded), messages, "log entry")
    same(encode_log_entry(decode_log_entry(encoded)), encoded, "log entry, encoded again")
    if not messages:
        return
    ids = [one.message_id for one in messages]
    same(read_log_entry_head(entry), (len(ids), messages[0].received_at_ms), "head")
    same(last_message_id(entry), ids[-1], "last message")
    removal = remove_messages(entry, set(ids[::2]), lambda *_: True)
    kept = decode_log_entry(removal.kept) if removal.kept is not None else []
    same(kept, [one for one in messages if one.message_id not in set(ids[::2])], "kept")


def _of_parts(entry: bytes, messages_max: int) -> list[MessageMetadata]:
    """The messages of a log entry as a router reads them: `messages_max` at a time."""
    found: list[MessageMetadata] = []
    for part in read_log_parts(entry, messages_max=messages_max, bytes_max=64 * messages_max):
        if part is not None:
            messages = list(_messages(part.runs))
            same(list(_messages(part.read())), messages, "a part that is read again")
            found += messages
    return found


def _messages(runs: Iterable[LogRun]) -> Iterator[MessageMetadata]:
    for run in runs:
        for fields, headers, delay_ms, (size,), queue in one_by_one(run):
            delay = None if delay_ms == NO_DELAY else delay_ms
            yield MessageMetadata(*fields, headers, delay, size, queue)


def pack(data: bytes) -> None:
    """A payload pack; what is left of it when a payload goes."""
    payloads = decode_pack(7, data)
    if not payloads:
        return
    same(decode_pack(7, encode_pack(_listed(7, payloads))), payloads, "pack")
    rest_of_pack(7, payloads, {min(payloads)})


def _listed(first_id: int, payloads: Mapping[int, bytes]) -> list[bytes | None]:
    """The payloads of a pack by their places."""
    return [payloads.get(one) for one in range(first_id, max(payloads, default=first_id - 1) + 1)]


_PLACE: Final = QueueShard("q", 0)
_QUEUE: Final = "q"


def arrow(data: bytes) -> None:
    """A list of a queue as columns: what the codec refuses or takes, columns do, too."""
    if not data:
        return
    kind, value = data[0] % 3, data[1:]
    decode = (decode_active, decode_done, decode_failed)[kind]
    key_of = (active_key, done_key, failed_key)[kind]
    rows = [(key_of(_QUEUE, 1 << 30), value)]

    def columns() -> int:
        batches: list[pa.RecordBatch]
        if kind == 0:
            batches = active_batches(rows, _PLACE)
        else:
            batches = [(done_batch if kind == 1 else failed_batch)(rows, _PLACE)]
        return sum(one.num_rows for one in batches)

    try:
        found: Any = decode(value)
    except CorruptRecord:
        refused(columns, CorruptRecord, "columns of what the codec refuses")
        raise
    same(columns(), len(found[0]) + len(found[1]) if kind == 0 else len(found), "rows")
    if kind == 1:
        same(decode_done_heads(value), [tuple(one[:3]) for one in found], "heads")
