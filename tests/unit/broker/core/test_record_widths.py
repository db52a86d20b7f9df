"""No input makes a record that a broker's commit loop cannot write: the table of what it writes."""

from __future__ import annotations

from typing import Any

import pytest

from libs.events.relay import BATCH_EVENTS
from libs.serving.events.outbox import REQUEST_ID_MAX
from libs.serving.limits import REQUEST_ID_BYTES_MAX
from libs.storage.database.clocks import LAST_MS
from libs.storage.layout.buckets import (
    MAX_EPOCH,
    MAX_NUMBER,
    MAX_ORDER,
    MAX_PRIORITY,
    BucketKind,
)
from libs.storage.layout.ids import MAX_MESSAGE_ID
from libs.storage.records.archived_records import ArchivedMessage, encode_archived
from libs.storage.records.delayed_records import DelayedMessage, encode_delayed
from libs.storage.records.event_records import (
    EventCounterRecord,
    EventsRecord,
    encode_event_counter,
    encode_events,
)
from libs.storage.records.execution_records import (
    ExecutedRecord,
    OutboxCounter,
    encode_executed,
    encode_outbox_counter,
)
from libs.storage.records.queues import (
    AvailableMessage,
    DoneMessage,
    FailedAttempt,
    FailedMessage,
    InFlightMessage,
    encode_active,
    encode_attempts,
    encode_done,
    encode_failed,
)
from libs.storage.records.states import (
    FINGERPRINT_BYTES,
    ArchivedRecord,
    FinishedLeasesRecord,
    LaneRecord,
    LeaseOutcome,
    OrderRange,
    PurgesRecord,
    QueueStateRecord,
    encode_clock,
    encode_config_revision,
    encode_draining,
    encode_finished_leases,
    encode_leaving,
    encode_queue_state,
    encode_routing_cursor,
)
from services.broker.core.lease_table import SLOT_LEASES_MAX
from services.broker.core.leases import IN_FLIGHT_BUCKET_MAX
from services.broker.core.lists.attempts import ATTEMPTS_KEPT
from services.broker.core.lists.executed import ROW_REQUEST_IDS_MAX
from services.broker.core.lists.finished_lists import LIST_ROW_MAX
from services.broker.core.lists.outbox import BYTES_MAX
from services.broker.core.settings import MAX_LEASE_MS, MAX_TOTAL_LEASE_MS
from services.broker.core.waiting.available import TIMED_BUCKET_MAX
from services.broker.core.waiting.delayed_journal import ROW_MAX
from services.broker.core.waiting.lane import READY_BUCKET_MAX
from services.broker.delivery.responses import CONSUMER_ID_BYTES_MAX
from services.broker.outbox.pusher import PUSHES_BYTES_MAX
from services.broker.requests.limits import REASON_BYTES_MAX
from services.broker.requests.queues import _LEAST_MOST
from services.broker.rpc.dead_letter_rows import RUN_BYTES_MAX
from tests.record_widths import INT64, UINT64, Number, Record, Value, check, encoders, text

QUEUE_ID_BYTES_MAX = 255
"""See `services.broker.requests.queues.QUEUE_ID`."""

COUNTED = "counted up, one by one or with a commit"
CLOCK = "the broker's clock ends at LAST_MS"
ORDERS = "an order is made of parts that `order_of` bounds"
BUCKETS_MAX = max(READY_BUCKET_MAX, TIMED_BUCKET_MAX)

MESSAGE_ID = Number(64, MAX_MESSAGE_ID, "rpc.assignment: IDs of the log's shard")
PRIORITY = Number(8, MAX_PRIORITY, "rpc.assignment, requests.queues: 0..255")
ATTEMPTS = Number(16, _LEAST_MOST["max_attempts"][1], "requests.queues: max_attempts of a queue")
RETENTION = Number(63, INT64, "an int64 of rpc.assignment, not negative")
CONSUMER = text(CONSUMER_ID_BYTES_MAX, "delivery.responses")
REASON = text(REASON_BYTES_MAX, "rpc.consumer, outbox.executor: reason of a nack")
LEASE = Number(64, UINT64, "a token is 64 bits")
ORDER = Number(64, MAX_ORDER, ORDERS)
COUNT = Number(64, UINT64, COUNTED)
REVISION = Number(64, UINT64, COUNTED)


def state(lanes: list[LaneRecord]) -> bytes:
    most: dict[str, Any] = {name: field.most for name, field in STATE.items()}
    return encode_queue_state(QueueStateRecord(**most)._replace(lanes=tuple(lanes)))


STATE: dict[str, Number | Value] = {
    "epoch": Number(8, MAX_EPOCH, ORDERS),
    "deleted": Number(8, 1, "a boolean"),
    "last_order": ORDER,
    "garbage_epochs": Value(tuple(range(MAX_EPOCH + 1)), "waiting.orders.free_epoch"),
    "created_revision": REVISION,
    "in_flight_count": Number(32, _LEAST_MOST["max_in_flight"][1], "max_in_flight of a queue"),
    "done_count": COUNT,
    "failed_count": COUNT,
    "first_in_flight_order": ORDER,
    "oldest_done_order": ORDER,
    "oldest_failed_order": ORDER,
    "lanes": Value((), "see `a lane`"),
    "purges": Value(
        PurgesRecord(
            MAX_EPOCH,
            tuple(range(MAX_EPOCH + 1)),
            OrderRange(MAX_ORDER, MAX_ORDER),
            OrderRange(MAX_ORDER, MAX_ORDER),
        ),
        ORDERS,
    ),
    "archived": Value(ArchivedRecord(UINT64, MAX_ORDER, OrderRange(MAX_ORDER, MAX_ORDER)), ORDERS),
}

RECORDS = {
    "messages that wait": Record(
        AvailableMessage,
        {
            "message_id": MESSAGE_ID,
            "priority": PRIORITY,
            "visible_at_ms": Number(63, INT64, "an int64 of rpc.assignment, not negative"),
            "retention_deadline_ms": RETENTION,
            "attempts": ATTEMPTS,
        },
        lambda rows: encode_active(rows, ()),
        BUCKETS_MAX,
        "waiting.lane, waiting.available",
    ),
    "messages in flight": Record(
        InFlightMessage,
        {
            "message_id": MESSAGE_ID,
            "priority": PRIORITY,
            "claimed_at_ms": Number(63, LAST_MS, CLOCK),
            "lease_deadline_ms": Number(63, LAST_MS + MAX_TOTAL_LEASE_MS, CLOCK),
            "attempts": ATTEMPTS,
            "retention_deadline_ms": RETENTION,
            "lease_length_ms": Number(32, MAX_LEASE_MS, "max_lease_ms of a queue"),
            "consumer": CONSUMER,
            "lease": LEASE,
        },
        lambda rows: encode_active((), rows),
        IN_FLIGHT_BUCKET_MAX,
        "leases.leases",
    ),
    "done messages": Record(
        DoneMessage,
        {
            "message_id": MESSAGE_ID,
            "done_at_ms": Number(63, LAST_MS, CLOCK),
            "attempts": ATTEMPTS,
            "consumer": CONSUMER,
            "first_claimed_at_ms": Number(63, LAST_MS, CLOCK),
            "lease": LEASE,
            "transferred_to": text(QUEUE_ID_BYTES_MAX, "requests.queues"),
        },
        encode_done,
        LIST_ROW_MAX,
        "lists.finished_lists",
    ),
    "dead letters": Record(
        FailedMessage,
        {
            "message_id": MESSAGE_ID,
            "failed_at_ms": Number(63, LAST_MS, CLOCK),
            "attempts": ATTEMPTS,
            "priority": PRIORITY,
            "retention_deadline_ms": RETENTION,
            "reason": REASON,
        },
        encode_failed,
        LIST_ROW_MAX,
        "lists.finished_lists",
    ),
    "archived dead letters": Record(
        ArchivedMessage,
        {
            "message_id": MESSAGE_ID,
            "failed_at_ms": Number(63, LAST_MS, CLOCK),
            "archived_at_ms": Number(63, LAST_MS, CLOCK),
            "attempts": ATTEMPTS,
            "priority": PRIORITY,
            "retention_deadline_ms": RETENTION,
            "run": text(RUN_BYTES_MAX, "rpc.removals"),
        },
        encode_archived,
        LIST_ROW_MAX,
        "lists.finished_lists",
    ),
    "failed attempts": Record(
        FailedAttempt,
        {
            "consumer": CONSUMER,
            "claimed_at_ms": Number(63, LAST_MS, CLOCK),
            "outcome": text(len("nack: ") + REASON_BYTES_MAX, "core.lease_table"),
            "queue": text(QUEUE_ID_BYTES_MAX, "requests.queues"),
        },
        encode_attempts,
        ATTEMPTS_KEPT,
        "lists.attempts",
    ),
    "delayed messages": Record(
        DelayedMessage,
        {
            "message_id": MESSAGE_ID,
            "priority": PRIORITY,
            "visible_at_ms": Number(63, INT64, "an int64 of rpc.assignment, not negative"),
            "retention_deadline_ms": RETENTION,
            "bucket_order": ORDER,
            "bucket_number": Number(64, MAX_NUMBER, ORDERS),
        },
        encode_delayed,
        ROW_MAX,
        "waiting.delayed_journal",
    ),
    "the state of a queue": Record(
        QueueStateRecord, STATE, lambda rows: encode_queue_state(rows[0])
    ),
    "a lane": Record(
        LaneRecord,
        {
            "priority": PRIORITY,
            "kind": Number(8, max(BucketKind), "a kind of bucket"),
            "head_order": ORDER,
            "head_offset": Number(16, BUCKETS_MAX, "a place in a bucket"),
            "tail_order": ORDER,
            "waiting_count": COUNT,
        },
        state,
        (MAX_PRIORITY + 1) * len(BucketKind),
        "one for each priority and kind",
    ),
    "finished leases": Record(
        FinishedLeasesRecord,
        {
            "sequence": Number(64, UINT64, COUNTED),
            "leases": Value((UINT64,) * SLOT_LEASES_MAX, "leases.leases"),
            "outcomes": Value((max(LeaseOutcome),) * SLOT_LEASES_MAX, "one for each lease"),
        },
        lambda rows: encode_finished_leases(rows[0]),
    ),
    "the counter of an outbox": Record(
        OutboxCounter,
        {
            "last_number": Number(64, INT64, COUNTED),
            "first_waiting": Number(64, INT64 + 1, COUNTED),
            "waiting_bytes": Number(64, BYTES_MAX + PUSHES_BYTES_MAX, "Outbox.check_room"),
            "offset": Number(63, INT64, "below the numbers that were given out"),
        },
        lambda rows: encode_outbox_counter(rows[0]),
    ),
    "executed request IDs": Record(
        ExecutedRecord,
        {
            "request_id": text(REQUEST_ID_BYTES_MAX, "outbox.pusher"),
            "fingerprint": Value(bytes(FINGERPRINT_BYTES), "a hash"),
        },
        encode_executed,
        ROW_REQUEST_IDS_MAX,
        "lists.executed",
    ),
    "a routing cursor": Record(
        dict,
        {"message_id": Number(64, MAX_MESSAGE_ID, "rpc.assignment: last_sequence")},
        lambda rows: encode_routing_cursor(rows[0]["message_id"]),
    ),
    "the revision of the configs": Record(
        dict,
        {"revision": REVISION},
        lambda rows: encode_config_revision(rows[0]["revision"]),
    ),
    "the clock": Record(
        dict,
        {"milliseconds": Number(63, LAST_MS, CLOCK)},
        lambda rows: encode_clock(rows[0]["milliseconds"]),
    ),
    "since when a shard drains": Record(
        dict,
        {"since_ms": Number(63, LAST_MS, CLOCK)},
        lambda rows: encode_draining(rows[0]["since_ms"]),
    ),
    "since when a shard leaves": Record(
        dict,
        {"since_ms": Number(63, LAST_MS, CLOCK)},
        lambda rows: encode_leaving(rows[0]["since_ms"]),
    ),
    "events": Record(
        EventsRecord,
        {
            "after": Number(64, MAX_MESSAGE_ID, "the last ID of a log"),
            "events_count": Number(32, BATCH_EVENTS, "serving.events.outbox"),
            "event_type": text(64, "a name of the catalogue"),
            "request_id": text(4 * REQUEST_ID_MAX, "serving.events.outbox, in characters"),
            "encoded": Value(b"x" * (1 << 20), "its events"),
        },
        lambda rows: encode_events(rows[0]),
    ),
    "the counter of events": Record(
        EventCounterRecord,
        {
            "stream": Number(64, UINT64, "64 random bits"),
            "last_number": Number(64, UINT64, COUNTED),
        },
        lambda rows: encode_event_counter(rows[0]),
    ),
}

BEFORE_THE_COMMAND = {
    "encode_config": "`storable`",
    "encode_redrive": "`storable`",
    "encode_refused_push": "`storable`",
    "encode_replay": "`storable`",
    "encode_move": "`storable`",
    "encode_outbox": "made where the request is checked",
    "encode_headers": "made where the request is checked",
    "encode_format": "a constant and a name, written when a database is made",
    "encode_forgotten_revision": "a revision, as that of the configs",
}
"""Records that are encoded before their command changes anything, or that are like another one."""

OTHER_FORMS = {
    "encode_new": "encode_active",
    "encode_in_flight": "encode_active",
}
"""Faster encoders of the same records, held to these by golden rows."""


@pytest.mark.parametrize("name", RECORDS)
def test_what_a_broker_writes_fits_at_its_most(name: str) -> None:
    check(RECORDS[name])


def test_every_record_that_a_broker_encodes_is_in_the_table() -> None:
    here = {name for name in globals() if name.startswith("encode_")}
    known = here | BEFORE_THE_COMMAND.keys() | OTHER_FORMS.keys()

    assert encoders(["services/broker", "libs/serving", "libs/storage/database"]) == known
