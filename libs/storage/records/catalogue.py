"""Every kind of record: in which databases it is, and how its key and value are read.

For programs that walk a whole database; what reads one kind of record calls its codec itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from libs.storage.errors import CorruptRecord
from libs.storage.layout import own_keys
from libs.storage.layout.ids import decode_seq_block
from libs.storage.layout.keys import (
    KEY_VERSION,
    RecordType,
    log_key,
    parse_active_key,
    parse_config_key,
    parse_done_key,
    parse_failed_key,
    parse_log_key,
    parse_payload_key,
    parse_queue_state_key,
    queue_head,
    read_queue,
)
from libs.storage.layout.keys import NUMBER as _NUMBER
from libs.storage.layout.keys import open_key as _open_key
from libs.storage.records.archived_records import decode_archived
from libs.storage.records.configs import decode_config
from libs.storage.records.dedupe_records import decode_dedupe, decode_dedupe_ends
from libs.storage.records.delayed_records import decode_delayed
from libs.storage.records.event_records import (
    decode_event_counter,
    decode_event_cursor,
    decode_events,
)
from libs.storage.records.execution_records import (
    decode_executed,
    decode_outbox,
    decode_outbox_counter,
    decode_refused_push,
)
from libs.storage.records.log_bounds import decode_log_bounds, decode_log_gaps
from libs.storage.records.metadata import decode_log_entry
from libs.storage.records.move_records import decode_move
from libs.storage.records.payload_packs import decode_pack, parse_pack_key
from libs.storage.records.payloads import decode_payload
from libs.storage.records.queues import decode_active, decode_attempts, decode_done, decode_failed
from libs.storage.records.redrive_records import decode_redrive
from libs.storage.records.replay_records import decode_replay
from libs.storage.records.states import (
    decode_clock,
    decode_config_revision,
    decode_draining,
    decode_finished_leases,
    decode_forgotten_revision,
    decode_format,
    decode_leaving,
    decode_outbox_progress,
    decode_purge_epoch,
    decode_queue_state,
    decode_request_ids,
    decode_routing_cursor,
)
from libs.storage.records.task_records import decode_task_record, decode_task_request

INGEST: Final = frozenset({"ingest"})
BROKER: Final = frozenset({"broker"})
BOTH: Final = INGEST | BROKER


class RecordKind(NamedTuple):
    """A kind of record.

    Attributes:
        name: In words, such as `queue state`.
        services: Whose databases have it.
        parse_key: What a key says; raises CorruptRecord.
        decode: What a value says; raises CorruptRecord.
    """

    name: str
    services: frozenset[str]
    parse_key: Callable[[bytes], Any]
    decode: Callable[[bytes], Any]


def _parse_alone(key: bytes) -> None:
    """The key of a record of which a database has one."""
    reader = _open_key("key", RecordType(key[1]), key)
    reader.finish()


def _parse_attempts_key(key: bytes) -> tuple[str, int]:
    reader = _open_key("attempts key", RecordType.ATTEMPTS, key)
    queue = read_queue(reader)
    return queue, int(reader.last("message ID", _NUMBER)[0])


_PAYLOAD: Final = RecordKind("payload", INGEST, parse_payload_key, decode_payload)
_LOG_ENTRY: Final = RecordKind("log entry", INGEST, parse_log_key, decode_log_entry)

KINDS: Final[dict[RecordType, RecordKind]] = {
    RecordType.PAYLOAD: _PAYLOAD,
    RecordType.ACTIVE: RecordKind("active messages", BROKER, parse_active_key, decode_active),
    RecordType.DONE: RecordKind("done messages", BROKER, parse_done_key, decode_done),
    RecordType.FAILED: RecordKind("failed messages", BROKER, parse_failed_key, decode_failed),
    RecordType.ATTEMPTS: RecordKind("attempts", BROKER, _parse_attempts_key, decode_attempts),
    RecordType.CONFIG: RecordKind("queue config", BROKER, parse_config_key, decode_config),
    RecordType.QUEUE_STATE: RecordKind(
        "queue state", BROKER, parse_queue_state_key, decode_queue_state
    ),
    RecordType.ROUTING_CURSOR: RecordKind(
        "routing cursor", BROKER, own_keys.parse_routing_cursor_key, decode_routing_cursor
    ),
    RecordType.ID_BLOCK: RecordKind("ID block", INGEST, _parse_alone, decode_seq_block),
    RecordType.REQUEST_IDS: RecordKind(
        "request IDs", INGEST, own_keys.parse_request_ids_key, decode_request_ids
    ),
    RecordType.DEDUPE_KEY: RecordKind(
        "dedupe key", INGEST, own_keys.parse_dedupe_key, decode_dedupe
    ),
    RecordType.OUTBOX: RecordKind("outbox row", BROKER, own_keys.parse_outbox_key, decode_outbox),
    RecordType.PURGE_EPOCH: RecordKind("purge epoch", INGEST, _parse_alone, decode_purge_epoch),
    RecordType.OUTBOX_COUNTER: RecordKind(
        "outbox counter", BROKER, own_keys.parse_outbox_counter_key, decode_outbox_counter
    ),
    RecordType.CLOCK: RecordKind("clock", BOTH, _parse_alone, decode_clock),
    RecordType.CONFIG_REVISION: RecordKind(
        "config revision", BROKER, _parse_alone, decode_config_revision
    ),
    RecordType.FINISHED_LEASES: RecordKind(
        "finished leases", BROKER, own_keys.parse_finished_leases_key, decode_finished_leases
    ),
    RecordType.DEDUPE_END: RecordKind(
        "dedupe ends", INGEST, own_keys.parse_dedupe_ends_key, decode_dedupe_ends
    ),
    RecordType.DELAYED: RecordKind(
        "delayed messages", BROKER, own_keys.parse_delayed_key, decode_delayed
    ),
    RecordType.REPLAY: RecordKind("replay", BROKER, own_keys.parse_replay_key, decode_replay),
    RecordType.REDRIVE: RecordKind("redrive", BROKER, own_keys.parse_redrive_key, decode_redrive),
    RecordType.EXECUTED: RecordKind(
        "executed requests", BROKER, own_keys.parse_executed_key, decode_executed
    ),
    RecordType.OUTBOX_PROGRESS: RecordKind(
        "outbox progress", INGEST, own_keys.parse_outbox_progress_key, decode_outbox_progress
    ),
    RecordType.REFUSED_PUSH: RecordKind(
        "refused push", BROKER, own_keys.parse_refused_push_key, decode_refused_push
    ),
    RecordType.ARCHIVED: RecordKind(
        "archived messages", BROKER, own_keys.parse_archived_key, decode_archived
    ),
    RecordType.LOG_BOUNDS: RecordKind("log bounds", INGEST, _parse_alone, decode_log_bounds),
    RecordType.PAYLOAD_PACK: RecordKind(
        "payload pack", INGEST, parse_pack_key, partial(decode_pack, 0)
    ),
    RecordType.LOG_GAPS: RecordKind("log gaps", INGEST, _parse_alone, decode_log_gaps),
    RecordType.FORMAT: RecordKind("format", BOTH, _parse_alone, decode_format),
    RecordType.TASK: RecordKind("task", INGEST, own_keys.parse_task_key, decode_task_record),
    RecordType.EVENT_CURSOR: RecordKind("event cursor", INGEST, _parse_alone, decode_event_cursor),
    RecordType.FORGOTTEN_REVISION: RecordKind(
        "forgotten revision", BROKER, _parse_alone, decode_forgotten_revision
    ),
    RecordType.EVENTS: RecordKind("events", BOTH, own_keys.parse_events_key, decode_events),
    RecordType.EVENT_COUNTER: RecordKind("event counter", BOTH, _parse_alone, decode_event_counter),
    RecordType.DRAINING: RecordKind("draining", BOTH, _parse_alone, decode_draining),
    RecordType.MOVE: RecordKind("move", BROKER, own_keys.parse_move_key, decode_move),
    RecordType.LEAVING: RecordKind("leaving", BOTH, _parse_alone, decode_leaving),
    RecordType.TASK_REQUEST: RecordKind(
        "task request", INGEST, own_keys.parse_task_request_key, decode_task_request
    ),
}
"""All of them, by the type in their keys; log entries share the type of payloads."""

_LOG_HEAD: Final = log_key(0)[: -_NUMBER.size]
_QUEUE_KINDS: Final = frozenset(
    {
        RecordType.ACTIVE,
        RecordType.DONE,
        RecordType.FAILED,
        RecordType.ATTEMPTS,
        RecordType.ARCHIVED,
        RecordType.DELAYED,
    }
)


def kind_of_key(key: bytes) -> RecordKind:
    """The kind of record that has this key. Raises CorruptRecord for none that is known."""
    if len(key) < 2 or key[0] != KEY_VERSION:
        raise CorruptRecord("key", f"{key[:16].hex()} has no known version")
    if key.startswith(_LOG_HEAD):
        return _LOG_ENTRY
    try:
        return KINDS[RecordType(key[1])]
    except ValueError:
        raise CorruptRecord("key", f"unknown type {key[1]:02x}") from None


def end_of_queue(key: bytes) -> bytes | None:
    """Where the rows of this kind and queue end; None where a key has no queue, or is damaged."""
    if len(key) < 2 or key[1] not in _QUEUE_KINDS:
        return None
    record_type = RecordType(key[1])
    try:
        queue = read_queue(_open_key("key", record_type, key))
    except CorruptRecord:
        return None
    return queue_head(record_type, queue) + b"\xff" * 17
