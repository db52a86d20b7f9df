"""The outbox: its room, what ingests refuse, and the numbers that pushes are sent with."""

from __future__ import annotations

import pytest

from libs.storage.layout.own_keys import outbox_counter_key, outbox_key, refused_push_key
from libs.storage.records.execution_records import (
    OutboxCounter,
    OutboxRecord,
    RefusedPushRecord,
    decode_outbox_counter,
    decode_refused_push,
    encode_outbox,
)
from services.broker.core.lists.outbox import (
    PUT_ASIDE,
    REASON_CHARACTERS_MAX,
    Outbox,
    RefusedPush,
)
from slatemq.errors import ResourceExhausted
from tests.unit.broker.core.shards import START_MS

VALUE = encode_outbox(OutboxRecord(7, "orders", b"payload", 7, {}))
INGEST = 4


def written(outbox: Outbox) -> dict[bytes, bytes | None]:
    had_changes, rows = outbox.has_changes, dict(outbox.drain())
    assert (had_changes, outbox.has_changes) == (True, False)
    return rows


def stored_counter(rows: dict[bytes, bytes | None]) -> OutboxCounter:
    value = rows[outbox_counter_key(INGEST)]
    assert value is not None
    return decode_outbox_counter(value)


def test_what_an_ingest_refuses_is_set_aside_and_its_number_is_still_sent() -> None:
    outbox = Outbox()
    for _ in range(2):
        outbox.push(INGEST, VALUE, START_MS)
    written(outbox)
    before = outbox.counter(INGEST)
    reason = "no " * REASON_CHARACTERS_MAX

    outbox.set_aside(INGEST, VALUE, reason, START_MS + 9)

    rows = written(outbox)
    kept = reason[:REASON_CHARACTERS_MAX]
    assert outbox.refused == {(INGEST, 1): RefusedPush("orders", 7, 7, START_MS + 9, kept)}
    stored = rows[refused_push_key(INGEST, 1)]
    assert stored is not None
    assert decode_refused_push(stored) == RefusedPushRecord(START_MS + 9, kept, VALUE)
    assert rows[outbox_key(INGEST, 1)] == PUT_ASIDE
    assert outbox.waiting_count(INGEST) == 2
    assert stored_counter(rows) == outbox.counter(INGEST)
    assert outbox.counter(INGEST) == before._replace(waiting_bytes=len(PUT_ASIDE) + len(VALUE))
    outbox.sent(INGEST, 1, len(PUT_ASIDE))
    outbox.sent(INGEST, 1, len(VALUE))
    assert outbox.counter(INGEST).waiting_bytes == 0


def test_a_refused_push_whose_row_is_damaged_has_no_queue_and_no_size() -> None:
    record = RefusedPushRecord(START_MS, "refused", b"damaged")

    assert RefusedPush.of(record) == RefusedPush("", 0, 0, START_MS, "refused")


def test_a_refused_push_is_forgotten_once() -> None:
    outbox = Outbox(refused={(INGEST, 3): RefusedPush("orders", 7, 7, START_MS, "no")})

    assert not outbox.forget((INGEST, 2))
    assert not outbox.has_changes
    assert outbox.forget((INGEST, 3))
    assert not outbox.forget((INGEST, 3))
    assert written(outbox) == {refused_push_key(INGEST, 3): None}


def test_what_waits_is_renumbered_to_follow_what_the_ingest_has() -> None:
    outbox = Outbox({INGEST: OutboxCounter(last_number=9, first_waiting=8, waiting_bytes=50)})

    outbox.renumber(INGEST, 20)

    assert stored_counter(written(outbox)) == OutboxCounter(9, 8, 50, offset=13)


def test_there_is_room_for_rows_and_bytes_and_in_an_empty_outbox_for_one_of_any_size() -> None:
    outbox = Outbox()
    outbox.rows_max, outbox.bytes_max = 3, 1000
    assert outbox.room(10) == 3
    assert outbox.room(400) == 2
    assert outbox.room(5000) == 1

    outbox.push(INGEST, bytes(400), START_MS)
    assert outbox.room(10) == 2
    assert outbox.room(301) == 1
    assert outbox.room(601) == 0
    outbox.push(INGEST + 1, bytes(700), START_MS)
    assert outbox.room(10) == 0


def test_a_full_outbox_says_what_waits_and_an_empty_one_takes_all() -> None:
    outbox = Outbox()
    outbox.rows_max, outbox.bytes_max = 2, 100
    outbox.check_capacity(9, 999)
    outbox.push(INGEST, bytes(60), START_MS)

    outbox.check_capacity(1, 40)
    for count, size_bytes in ((2, 2), (1, 41)):
        with pytest.raises(ResourceExhausted, match="1 of 2 pushes wait, with 60 of 100 bytes"):
            outbox.check_capacity(count, size_bytes)
