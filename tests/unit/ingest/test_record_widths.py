"""No input makes a record that the commit loop of ingest cannot write: a table of the records."""

from __future__ import annotations

from typing import Any

import pytest

from libs.events.tasks import cut_error
from libs.serving.limits import (
    HEADER_TEXT_BYTES_MAX,
    MESSAGE_DELAY_MS_MAX,
    PAYLOAD_BYTES_CEILING,
    REQUEST_ID_BYTES_MAX,
    RETENTION_S_MAX,
)
from libs.serving.process.instance import DEDUPE_WINDOW_S_MAX
from libs.storage.database.clocks import LAST_MS
from libs.storage.database.roots import Root
from libs.storage.database.slate import Batch
from libs.storage.layout.ids import (
    MAX_MESSAGE_ID,
    MAX_SEQUENCE,
    MAX_SHARD,
    SeqBlock,
    encode_seq_block,
    message_id,
)
from libs.storage.layout.own_keys import ID_BLOCK_KEY, REQUEST_DIGEST_BYTES, ULID_BYTES
from libs.storage.records.dedupe_records import DedupeRecord, encode_dedupe, encode_dedupe_ends
from libs.storage.records.event_records import EventCursorRecord, encode_event_cursor
from libs.storage.records.log_bounds import (
    GAPS_MAX,
    LogBoundsRecord,
    LogGap,
    encode_log_bounds,
    encode_log_gaps,
)
from libs.storage.records.metadata import encode_headers, encode_log_columns
from libs.storage.records.payloads import INLINE_PAYLOAD_MAX_BYTES, encode_inline, encode_uri
from libs.storage.records.states import (
    FINGERPRINT_BYTES,
    RequestIdRecord,
    encode_draining,
    encode_leaving,
    encode_outbox_progress,
    encode_request_ids,
)
from libs.storage.records.task_records import (
    AppliedTask,
    FailedTaskRecord,
    TaskRequestRecord,
    WaitingTask,
    encode_task_record,
    encode_task_request,
)
from services.ingest.batches import ENTRY_MESSAGES_MAX
from services.ingest.wire import (
    DEDUPE_KEY_BYTES_MAX,
    DELAY_MS_MAX,
    MESSAGES_MAX,
    NUMBER_MAX,
    QUEUE_ID_BYTES_MAX,
)
from services.ingest.write.dedupe_keys import ROW_KEYS_MAX
from services.ingest.write.request_ids import ROW_DUPLICATES_MAX, ROW_REQUESTS_MAX
from slatemq.errors import ResourceExhausted
from slatemq.v1.ingest_pb2 import PublishRun
from tests.manual_clock import ManualClock
from tests.record_widths import INT64, UINT64, Number, Record, Value, check, encoders, text
from tests.unit.ingest.shards import accepted, opened

MESSAGE_ID = Number(64, MAX_MESSAGE_ID, "layout.ids.message_id")
CLOCK = "the clock of ingest ends at LAST_MS"


def log_entry(rows: list[dict[str, Any]]) -> bytes:
    """Every row with the first one's numbers, as columns."""
    row, places = rows[0], range(len(rows))
    return encode_log_columns(
        row["message_id"] - len(rows) + 1,
        row["received_at_ms"],
        [row["created_at_ms"] for _ in places],
        [row["retention_s"] for _ in places],
        [row["headers"] for _ in places],
        [row["payload_bytes"] for _ in places],
        dict.fromkeys(places, row["visible_at_ms"]),
        dict.fromkeys(places, row["delay_ms"]),
        dict.fromkeys(places, row["direct_queue_id"]),
    )


RECORDS = {
    "a log entry": Record(
        dict,
        {
            "message_id": MESSAGE_ID,
            "created_at_ms": Number(63, INT64, "an int64 of wire, not negative"),
            "received_at_ms": Number(63, LAST_MS, CLOCK),
            "visible_at_ms": Number(63, INT64, "an int64 of wire, not negative"),
            "retention_s": Number(32, RETENTION_S_MAX, "wire, a uint32"),
            "headers": Value(encode_headers({}), "encoded where the request is checked"),
            "delay_ms": Number(63, max(MESSAGE_DELAY_MS_MAX, DELAY_MS_MAX), "wire"),
            "payload_bytes": Number(32, PAYLOAD_BYTES_CEILING, "the setting's maximum"),
            "direct_queue_id": text(QUEUE_ID_BYTES_MAX, "wire"),
        },
        log_entry,
        ENTRY_MESSAGES_MAX,
        "batches.Columns.entries",
    ),
    "request IDs": Record(
        RequestIdRecord,
        {
            "request_id": text(REQUEST_ID_BYTES_MAX, "wire"),
            "first_message_id": MESSAGE_ID,
            "message_count": Number(32, MESSAGES_MAX, "wire"),
            "fingerprint": Value(bytes(FINGERPRINT_BYTES), "a hash"),
            "duplicates": Value((), "see `duplicates of publishes`"),
        },
        encode_request_ids,
        ROW_REQUESTS_MAX,
        "write.request_ids",
    ),
    "duplicates of publishes": Record(
        dict,
        {
            "place": Number(32, MESSAGES_MAX, "wire"),
            "message_id": MESSAGE_ID,
        },
        lambda rows: encode_request_ids(
            [
                RequestIdRecord(
                    *("", 1, 1, bytes(FINGERPRINT_BYTES)),
                    tuple((row["place"], row["message_id"]) for row in rows),
                )
            ]
        ),
        ROW_DUPLICATES_MAX + MESSAGES_MAX,
        "write.request_ids: a row ends behind the publish with which it has more",
    ),
    "a dedupe key": Record(
        DedupeRecord,
        {
            "message_id": MESSAGE_ID,
            "end_ms": Number(63, LAST_MS + 1000 * DEDUPE_WINDOW_S_MAX, CLOCK),
        },
        lambda rows: encode_dedupe(rows[0]),
    ),
    "ends of dedupe keys": Record(
        dict,
        {"key": text(DEDUPE_KEY_BYTES_MAX, "wire")},
        lambda rows: encode_dedupe_ends([row["key"] for row in rows]),
        ROW_KEYS_MAX,
        "write.dedupe_keys",
    ),
    "progress of an outbox": Record(
        dict,
        {"number": Number(64, NUMBER_MAX + MESSAGES_MAX, "wire")},
        lambda rows: encode_outbox_progress(rows[0]["number"]),
    ),
    "a block of IDs": Record(
        SeqBlock,
        {
            "base": Number(64, MAX_SEQUENCE, "layout.ids.IdAllocator"),
            "size": Number(64, MAX_SEQUENCE, "layout.ids.IdAllocator"),
        },
        lambda rows: encode_seq_block(rows[0]),
    ),
    "gaps of the log": Record(
        LogGap,
        {"after": MESSAGE_ID, "next": MESSAGE_ID},
        encode_log_gaps,
        GAPS_MAX + 1,
        "write.id_gaps",
    ),
    "the bounds of the log": Record(
        LogBoundsRecord,
        {
            "first_sequence": Number(64, MAX_MESSAGE_ID + 1, "behind the last message"),
            "last_sequence": MESSAGE_ID,
            "last_message_id": MESSAGE_ID,
        },
        lambda rows: encode_log_bounds(rows[0]),
    ),
    "the cursor of events": Record(
        EventCursorRecord,
        {
            "stream": Number(64, UINT64, "64 random bits"),
            "message_id": MESSAGE_ID,
            "lost_count": Number(64, UINT64, "counted up"),
        },
        lambda rows: encode_event_cursor(rows[0]),
    ),
    "a task that waits": Record(
        WaitingTask,
        {
            "at_ms": Number(63, LAST_MS, CLOCK),
            "has_failed": Number(8, 1, "a boolean"),
        },
        lambda rows: encode_task_record(rows[0]),
    ),
    "a task that is applied": Record(
        AppliedTask,
        {
            "at_ms": Number(63, LAST_MS, CLOCK),
            "first_message_id": MESSAGE_ID,
            "message_count": Number(32, MESSAGES_MAX, "wire"),
            "received_at_ms": Number(63, LAST_MS, CLOCK),
            "duplicates": Value(((MESSAGES_MAX, MAX_MESSAGE_ID),) * MESSAGES_MAX, "wire"),
            "has_failed": Value(False, "a boolean"),
            "request": Value(bytes(REQUEST_DIGEST_BYTES), "a digest"),
        },
        lambda rows: encode_task_record(rows[0]),
    ),
    "the request of a task": Record(
        TaskRequestRecord,
        {
            "ulid": Value(bytes(ULID_BYTES), "TaskIds"),
            "fingerprint": Value(bytes(FINGERPRINT_BYTES), "Accepted.fingerprint"),
        },
        lambda rows: encode_task_request(rows[0]),
    ),
    "a task that failed": Record(
        FailedTaskRecord,
        {
            "at_ms": Number(63, LAST_MS, CLOCK),
            "attempts": Number(32, 1 << 31, "max_retries of a backend, an int32"),
            "error": Value(cut_error("é" * 70_000), "cut_error"),
        },
        lambda rows: encode_task_record(rows[0]),
    ),
    "a payload": Record(
        dict,
        {"payload": Value(bytes(INLINE_PAYLOAD_MAX_BYTES), "larger ones are objects")},
        lambda rows: encode_inline(rows[0]["payload"]),
    ),
    "where a payload is": Record(
        dict,
        {"uri": text(4096, "the root's URL, and a name of 32 characters")},
        lambda rows: encode_uri(rows[0]["uri"]),
    ),
    "since when an ingest drains": Record(
        dict,
        {"since_ms": Number(63, LAST_MS, CLOCK)},
        lambda rows: encode_draining(rows[0]["since_ms"]),
    ),
    "since when an ingest leaves": Record(
        dict,
        {"since_ms": Number(63, LAST_MS, CLOCK)},
        lambda rows: encode_leaving(rows[0]["since_ms"]),
    ),
}

BEFORE_THE_COMMAND = {
    "encode_log_entry": "an edit encodes its entry before it changes anything; a tail writes none",
    "encode_metadata_record": "for its size only: see read.entries",
    "encode_purge_epoch": "counted up, as an outbox's progress",
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_an_ingest_writes_fits_at_its_most(name: str) -> None:
    check(RECORDS[name])


def test_every_record_that_an_ingest_encodes_is_in_the_table() -> None:
    here = {name for name in globals() if name.startswith("encode_")}

    assert encoders(["services/ingest", "libs/serving/process"]) == here | BEFORE_THE_COMMAND.keys()


def extreme(**fields: Any) -> PublishRun:
    return PublishRun(
        payloads=[b"x"],
        headers={f"{n:03}" + "k" * (HEADER_TEXT_BYTES_MAX - 3): "" for n in range(2)},
        created_at_ms=INT64,
        retention_s=RETENTION_S_MAX,
        **fields,
    )


async def test_an_ingest_at_the_last_time_and_the_last_ids_stores_what_fits_and_refuses_the_rest(
    root: Root,
) -> None:
    # Given a shard whose clock has stopped at its end, with four IDs left
    clock, left = ManualClock(LAST_MS), 4
    async with opened(root, clock, shard=MAX_SHARD) as shard:
        await shard.publisher.publish(accepted(extreme(visible_at_ms=INT64)))
        batch = Batch()
        used = SeqBlock(MAX_SEQUENCE - left, 1)
        batch.put(ID_BLOCK_KEY, encode_seq_block(used))
        await shard.database.write(batch)
        await shard.database.flush()

    # When all its fields are at their most
    async with opened(root, clock, shard=MAX_SHARD, id_block_size=1) as shard:
        first = await shard.publisher.publish(
            accepted(
                extreme(visible_at_ms=INT64, dedupe_keys=["d" * DEDUPE_KEY_BYTES_MAX]),
                extreme(delay_ms=1),
                request_id="r" * REQUEST_ID_BYTES_MAX,
            )
        )
        # Then it is stored, and what has no ID any more is refused, without harm to others
        with pytest.raises(ResourceExhausted, match="this shard is full"):
            await shard.publisher.publish(accepted(*[extreme()] * (left + 1)))
        last = await shard.publisher.publish(accepted(extreme(), extreme()))
        assert last.first_message_id + 1 == message_id(MAX_SHARD, MAX_SEQUENCE) == MAX_MESSAGE_ID
        with pytest.raises(ResourceExhausted, match="this shard is full"):
            await shard.publisher.publish(accepted(extreme()))
        assert shard.publisher.commits.failed is None

    # And the next owner has it
    async with opened(root, clock, shard=MAX_SHARD, id_block_size=1) as shard:
        assert shard.log.end.last_message_id == MAX_MESSAGE_ID
        again = await shard.publisher.publish(
            accepted(
                extreme(visible_at_ms=INT64, dedupe_keys=["d" * DEDUPE_KEY_BYTES_MAX]),
                extreme(delay_ms=1),
                request_id="r" * REQUEST_ID_BYTES_MAX,
            )
        )
        assert again.first_message_id == first.first_message_id
